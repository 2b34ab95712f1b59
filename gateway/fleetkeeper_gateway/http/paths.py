"""The paths that the gateway passes on: the inference paths of the engine's serving port.

tests/gateway/http holds this list equal to the engine's.
"""

from __future__ import annotations

from typing import Final

GENERATES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""Paths whose answer is generated token by token, up to a number that the client may set."""
INFERENCE: Final = GENERATES | {
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
}
"""Paths that take a POST with a JSON body that names a model."""
MODELS: Final = "/v1/models"
RESPONSES: Final = "/v1/responses/"
"""Prefix of stored responses. They are in the memory of one engine, which a request cannot name."""
