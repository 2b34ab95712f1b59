"""What admission needs to know of a request, read from its path and body. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple


class Route(Enum):
    """What may be done with a path of the serving port."""

    GENERATION = "generation"
    """Work for the engine: through the queue."""
    PLAIN = "plain"
    """Answered by the API server alone."""
    OPEN = "open"
    """Plain, and without an API key."""
    LOOPBACK = "loopback"
    """Only for the pod itself."""
    UNKNOWN = "unknown"


_GENERATION = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
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
_PLAIN = frozenset({"/v1/models", "/tokenize", "/detokenize"})
_OPEN = frozenset({"/health", "/version"})
_LISTS = ("input", "prompt", "documents", "text_1", "text_2", "data_1", "data_2")


_DECODER = json.JSONDecoder()
_JSON_SPACE = " \t\n\r"


def allows_background(path: str) -> bool:
    """Whether `background` means something to the route; others ignore the field."""
    return path == "/v1/responses"


def route_of(method: str, path: str) -> Route:
    """The route of a request. What is not known is unknown: the serving port is an allow-list."""
    if path in _GENERATION:
        return Route.GENERATION if method == "POST" else Route.PLAIN
    if path in _OPEN:
        return Route.OPEN
    if path == "/metrics":
        return Route.LOOPBACK
    if path in _PLAIN or path.startswith(("/v1/models/", "/v1/responses/")):
        return Route.PLAIN
    return Route.UNKNOWN


class Shape(NamedTuple):
    """A body that could be read."""

    sequences: int
    """How many the engine will run at once for it."""
    has_priority: bool
    in_background: bool = False
    """The response is to be made after the answer (responses API)."""


def shape_of(body: bytes) -> Shape | None:
    """The shape of a JSON body; None when it is none (vLLM then says what is wrong with it)."""
    try:
        fields = _parsed(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return Shape(
        sequences_of(fields),
        "priority" in fields,
        # vLLM takes "yes" and 1 for true as well.
        in_background=fields.get("background") not in (None, False),
    )


def _parsed(body: bytes) -> object:
    """What `json.loads` says, sooner for what nearly all bodies are: an object in UTF-8 from the first byte."""
    if body[:1] != b"{" or body[1:2] == b"\0":
        return json.loads(body)
    text = body.decode("utf-8", "surrogatepass")
    fields, end = _DECODER.raw_decode(text)
    if text[end:].strip(_JSON_SPACE):
        raise ValueError(f"more than one value: a second one begins at {end}")
    return fields


def sequences_of(fields: Mapping[str, Any]) -> int:
    """Sequences of a request: the inputs it lists, times the choices it wants of each.

    A prompt may be a text, a list of texts, a list of token numbers (one prompt) or a list of such
    lists. `best_of` above `n`, and beam search (whose width is `n`), run that many at once.
    """
    inputs = 1
    for name in _LISTS:
        if name in fields:
            inputs = max(inputs, _inputs(name, fields[name]))
    choices = max(_whole(fields.get("n")), _whole(fields.get("best_of")))
    return inputs * choices


def _inputs(name: str, value: object) -> int:
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return 1
    # The items of one conversation (responses API) are a single sequence; documents are one each.
    return 1 if name == "input" and isinstance(value[0], dict) else len(value)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 1 else 1


def with_priority(body: bytes, shape: Shape, priority: int) -> bytes:
    """The body with our priority in place of the client's.

    Without one of the client's it is appended to the text, so that a long prompt is not written anew.
    """
    if not shape.has_priority:
        text = body.rstrip()
        comma = b"" if text[:-1].rstrip().endswith(b"{") else b","
        return b'%b%b"priority":%d}' % (text[:-1], comma, priority)
    fields = json.loads(body)
    fields["priority"] = priority
    return json.dumps(fields).encode()
