"""The properties of a request that admission needs, read from its path and body. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from fleetkeeper_engine.in_vllm.http.request_bounds import (
    SMALL_BYTES,
    Outline,
    RefusedBodyError,
    check_messages,
    check_structure,
    needs_check,
    too_deep,
)


class Route(Enum):
    """The handling of a path on the serving port."""

    GENERATION = "generation"
    """Work for the engine: through the queue."""
    TOKENIZER = "tokenizer"
    """Answered by the API server alone, with much processor time."""
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
_PLAIN = frozenset({"/v1/models"})
_TOKENIZER = frozenset({"/tokenize", "/detokenize"})
_OPEN = frozenset({"/health", "/version"})
_CHOICES = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths where `n` has a meaning."""
_SCORED = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
_LISTS = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": (),
    "/v1/responses": (),
    "/score": _SCORED,
    "/v1/score": _SCORED,
    "/rerank": ("documents",),
    "/v1/rerank": ("documents",),
    "/v2/rerank": ("documents",),
}
_POOLED = ("input", "messages")
MAX_POOLED = 2048
"""Inputs of one request for embeddings or scores, which take one step each. OpenAI has the same bound."""
_MAX_COUNTED = 10**9
_INT = TypeAdapter(int)


_DECODER = json.JSONDecoder()
_JSON_SPACE = " \t\n\r"


def allows_background(path: str) -> bool:
    """Return whether the route has a field `background`; others ignore it."""
    return path == "/v1/responses"


def route_of(method: str, path: str) -> Route:
    """Return the route of a request. The serving port is an allow-list: other paths are unknown."""
    if path in _GENERATION:
        return Route.GENERATION if method == "POST" else Route.PLAIN
    if path in _TOKENIZER:
        return Route.TOKENIZER if method == "POST" else Route.PLAIN
    if path in _OPEN:
        return Route.OPEN
    if path == "/metrics":
        return Route.LOOPBACK
    if path in _PLAIN or path.startswith(("/v1/models/", "/v1/responses/")):
        return Route.PLAIN
    return Route.UNKNOWN


class Shape(NamedTuple):
    """The relevant properties of a readable body."""

    sequences: int
    """The sequences that the engine will run at once for it."""
    has_priority: bool
    in_background: bool = False
    """The response is to be generated after the HTTP response (responses API)."""


def shape_of(body: bytes, path: str, outline: Outline | None = None) -> Shape | None:
    """Return the shape of a JSON body; None if it has none (vLLM then reports what is wrong with it).

    Args:
        body: the whole body.
        path: the route's path, which decides the meaning of the fields.
        outline: the outline of a large body.

    Raises:
        RefusedBodyError: if the body exceeds the bounds, or a large one is not JSON.
    """
    try:
        fields = _parsed(body) if outline is None else outline.fields()
    except RecursionError:
        raise too_deep() from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        if outline is not None:
            raise RefusedBodyError(400, "invalid_json", "The body is not a JSON object.")
        return None
    # A small body with few brackets and commas is within the bounds.
    if outline is not None or needs_check(body):
        check_structure(fields, outlined=outline is not None)
    if outline is not None:
        _check_choices(fields)
    check_messages(fields.get("messages"))
    return Shape(
        sequences_of(fields, path),
        "priority" in fields,
        # vLLM also accepts "yes" and 1 as true.
        in_background=fields.get("background") not in (None, False),
    )


def _parsed(body: bytes) -> object:
    """Parse as `json.loads` does, but faster for nearly all bodies: an object in UTF-8 from the first byte."""
    if body[:1] != b"{" or body[1:2] == b"\0":
        return json.loads(body)
    text = body.decode("utf-8", "surrogatepass")
    fields, end = _DECODER.raw_decode(text)
    if text[end:].strip(_JSON_SPACE):
        raise ValueError(f"more than one value: a second one begins at {end}")
    return fields


def max_sequences(path: str, at_once: int) -> int:
    """Return the most sequences that one request of a route may ask for.

    Args:
        path: the route's path.
        at_once: the most that the engine can run at once: its limit at the start.
    """
    return at_once if path in _LISTS and not _scores(path) else max(at_once, MAX_POOLED)


def check_sequences(shape: Shape, path: str, at_once: int) -> None:
    """Check that the engine can run the sequences of a request at once.

    Raises:
        RefusedBodyError: 422 with the value, the ceiling and what to do.
    """
    if shape.sequences <= at_once or shape.sequences <= (most := max_sequences(path, at_once)):
        return
    param = "n" if path in _CHOICES else "input"
    raise RefusedBodyError(
        422,
        "too_many_sequences",
        f"The request asks for {shape.sequences} sequences (inputs times choices, n); "
        f"this service takes at most {most} in one request. Lower n or split the request.",
        param,
    )


def sequences_of(fields: Mapping[str, Any], path: str) -> int:
    """Return the sequences of a request: its inputs, times the choices for each.

    A prompt may be a text, a list of texts, a list of token numbers (one prompt) or a list of such
    lists. `best_of` above `n` (older vLLM), and beam search (whose width is `n`), run that many at
    once.
    """
    inputs = 1
    for name in _LISTS.get(path, _POOLED):
        if name in fields:
            inputs = max(inputs, _inputs(name, fields[name]))
    if path not in _CHOICES:
        return inputs
    embedded = fields.get("prompt_embeds")
    if embedded is not None and path == "/v1/completions":
        # Prompts given as embeddings run in addition to those given as texts.
        texts = inputs if fields.get("prompt") not in (None, "", []) else 0
        inputs = max(1, texts + (len(embedded) if isinstance(embedded, list) else 1))
    choices = max(_whole(fields.get("n")), _whole(fields.get("best_of")))
    return min(_MAX_COUNTED, inputs * choices)


def _check_choices(outlined: Mapping[str, Any]) -> None:
    """Refuse a long string in place of a number: vLLM parses spaces or zeros followed by a number."""
    for name in ("n", "best_of"):
        if outlined.get(name) == "":
            raise RefusedBodyError(422, "invalid_value", f"{name} must be a whole number.", name)


def _scores(path: str) -> bool:
    return path.endswith(("score", "rerank"))


def _inputs(name: str, value: object) -> int:
    if not isinstance(value, list) or not value or isinstance(value[0], int | float):
        return 1
    # The items of one conversation are a single sequence; each document is one.
    return 1 if name in _POOLED and isinstance(value[0], dict) else len(value)


def _whole(value: object) -> int:
    """Return a number of choices as vLLM reads it: "3" and 3.0 are 3. Values that vLLM refuses count as 1."""
    if type(value) is not int:
        if value is None:
            return 1
        try:
            value = _INT.validate_python(value)
        except ValidationError:
            return 1
    return min(max(value, 1), _MAX_COUNTED)


def with_priority(body: bytes, shape: Shape, priority: int) -> bytes:
    """Return the body with our priority in place of the client's.

    The priority is appended to the text, which avoids serializing a long prompt again. Only a small
    body whose client set a priority is serialized. In a large body the JSON parser takes the last
    of two.
    """
    if not shape.has_priority or len(body) > SMALL_BYTES:
        text = body.rstrip()
        comma = b"" if text[:-1].rstrip().endswith(b"{") else b","
        return b'%b%b"priority":%d}' % (text[:-1], comma, priority)
    fields = json.loads(body)
    fields["priority"] = priority
    return json.dumps(fields).encode()
