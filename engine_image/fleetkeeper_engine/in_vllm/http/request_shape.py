"""The properties of a request that admission needs, and bounds on its messages. Pure.

vLLM validates bodies in the event loop that also answers probes. Ten thousand wrong values in
`messages` take it more than a second, so the first one is refused here. Values and levels of every
body are bounded where it is read (fleetkeeper_contract.bodies).
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Final, NamedTuple

from fleetkeeper_contract.bodies.asked import CHOICES, INPUTS, is_long_number, sequences_of
from fleetkeeper_contract.bodies.outline import PART_BYTES, LongText
from fleetkeeper_contract.bodies.reader import JsonBody
from fleetkeeper_contract.bodies.refused import RefusedBodyError


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
MAX_POOLED = 2048
"""Inputs of one request for embeddings or scores, which take one step each. OpenAI has the same bound."""
MAX_MESSAGES: Final = 2048
_FEW_MESSAGES = 64
"""Up to this many wrong messages are left to vLLM, which names every error in each."""


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


def shape_of(body: JsonBody, path: str) -> Shape:
    """Return the shape of a body.

    Args:
        body: the body.
        path: the route's path, which decides the meaning of the fields.

    Raises:
        RefusedBodyError: if a value exceeds a bound.
    """
    fields = body.fields
    for name in ("n", "best_of"):
        if name in fields and is_long_number(body, fields[name]):
            # vLLM takes any number of spaces or zeros before a number.
            raise RefusedBodyError(422, "invalid_value", f"{name} must be a whole number.", name)
    check_messages(fields.get("messages"))
    return Shape(
        sequences_of(body, path),
        "priority" in fields,
        # vLLM also accepts "yes" and 1 as true.
        in_background=fields.get("background") not in (None, False),
    )


def max_sequences(path: str, at_once: int) -> int:
    """Return the most sequences that one request of a route may ask for.

    Args:
        path: the route's path.
        at_once: the most that the engine can run at once: its limit at the start.
    """
    return at_once if path in INPUTS and not _scores(path) else max(at_once, MAX_POOLED)


def check_sequences(shape: Shape, path: str, at_once: int) -> None:
    """Check that the engine can run the sequences of a request at once.

    Raises:
        RefusedBodyError: 422 with the value, the ceiling and what to do.
    """
    if shape.sequences <= at_once or shape.sequences <= (most := max_sequences(path, at_once)):
        return
    param = "n" if path in CHOICES else "input"
    raise RefusedBodyError(
        422,
        "too_many_sequences",
        f"The request asks for {shape.sequences} sequences (inputs times choices, n); "
        f"this service takes at most {most} in one request. Lower n or split the request.",
        param,
    )


def _scores(path: str) -> bool:
    return path.endswith(("score", "rerank"))


def with_priority(body: bytes, shape: Shape, priority: int) -> bytes:
    """Return the body with our priority in place of the client's.

    The priority is appended to the text, which avoids serializing a long prompt again. Only a small
    body whose client set a priority is serialized. In a large body the JSON parser takes the last
    of two.
    """
    if not shape.has_priority or len(body) > PART_BYTES:
        text = body.rstrip()
        comma = b"" if text[:-1].rstrip().endswith(b"{") else b","
        return b'%b%b"priority":%d}' % (text[:-1], comma, priority)
    fields = json.loads(body)
    fields["priority"] = priority
    return json.dumps(fields).encode()


def check_messages(messages: object) -> None:
    """Check long lists in a conversation: vLLM takes a millisecond for every eight wrong items.

    Raises:
        RefusedBodyError: naming the first wrong message, or the bound.
    """
    if not isinstance(messages, list):
        return
    if len(messages) <= _FEW_MESSAGES:
        for place, message in enumerate(messages):
            if isinstance(message, dict) and not _is_content(message.get("content")):
                raise _wrong_message(place)
        return
    if len(messages) > MAX_MESSAGES:
        raise RefusedBodyError(
            400,
            "too_many_messages",
            f"messages has {len(messages)} items; at most {MAX_MESSAGES} are allowed.",
            "messages",
        )
    for place, message in enumerate(messages):
        if not _is_message(message):
            raise _wrong_message(place)


def _wrong_message(place: int) -> RefusedBodyError:
    return RefusedBodyError(
        400,
        "invalid_message",
        f"messages[{place}] must be an object with a role; its content, if any, must be text or parts.",
        "messages",
    )


def _is_message(message: object) -> bool:
    if isinstance(message, list):  # a batch of conversations, for embeddings
        return all(isinstance(item, dict) for item in message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str | LongText):
        return False
    content = message.get("content")
    return isinstance(content, str | list | LongText | None) and _is_content(content)


def _is_content(content: object) -> bool:
    if not isinstance(content, list) or len(content) <= _FEW_MESSAGES:
        return True
    return all(isinstance(part, dict) for part in content)
