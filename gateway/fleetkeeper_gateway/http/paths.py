"""The paths that the gateway forwards: the inference paths of the engine's serving port.

A test in tests/gateway/http compares this list with the engine's.
"""

from __future__ import annotations

from typing import Final

GENERATES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""Paths whose answer is generated token by token, up to a maximum that the client may set."""
TOKENIZES: Final = frozenset({"/tokenize", "/detokenize"})
"""Paths that take no sequence of an engine. They wake no service."""
INFERENCE: Final = (
    GENERATES
    | TOKENIZES
    | {
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    }
)
"""Paths that take a POST with a JSON body that names a model."""
SENT_AS: Final = {"/v1/rerank": "/rerank"}
"""Paths that are sent under another name: vllm-router 0.1.17 replaces the model on /v1/rerank."""
MODELS: Final = "/v1/models"
RESPONSES: Final = "/v1/responses/"
"""Prefix of stored responses, which are in the memory of one engine. A request cannot choose the engine."""
