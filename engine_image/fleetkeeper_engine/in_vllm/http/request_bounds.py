"""Bounds on a JSON body, checked without parsing all of a large one. Pure.

vLLM parses and validates bodies in the event loop that also answers probes. The time depends on the
number of values and on the depth, hardly on the length of strings. Ten thousand wrong values in
`messages` take it more than a second. A body may therefore be long, but may not have many small
parts.

Of a large body only an outline is parsed (fleetkeeper_contract.json_outline).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fleetkeeper_contract.json_outline import (
    MANY,
    MAX_VALUES,
    SMALL_BYTES,
    Outline,
    RefusedBodyError,
    too_many_values,
)

__all__ = [
    "MAX_DEPTH",
    "MAX_MESSAGES",
    "MAX_VALUES",
    "SMALL_BYTES",
    "Outline",
    "RefusedBodyError",
    "check_messages",
    "check_structure",
    "needs_check",
    "too_deep",
]

MAX_DEPTH: Final = 64
MAX_MESSAGES: Final = 2048
_FEW_MESSAGES = 64
"""Up to this many wrong messages are left to vLLM, which names every error in each."""
_FEW_BYTES = 4096
"""Parts up to this size are kept with all their numbers."""
_MANY_COMMAS = 512
"""This many wrong messages take vLLM less than a tenth of a second."""
_NUMBER_FIELDS = frozenset(
    {"prompt", "input", "tokens", "prompt_token_ids", "allowed_token_ids", "stop_token_ids"}
)


def needs_check(body: bytes) -> bool:
    """Return whether a small body could be deeper or have more values than allowed."""
    brackets = body.count(b"[") + body.count(b"{")
    return brackets > MAX_DEPTH or (len(body) > _FEW_BYTES and body.count(b",") > _MANY_COMMAS)


def check_structure(fields: Mapping[str, Any], *, outlined: bool) -> None:
    """Check depth and number of values.

    Args:
        fields: the body.
        outlined: whether it comes from an outline.

    Raises:
        RefusedBodyError: if a bound is exceeded; the message names it.
    """
    level: list[Any] = [
        {
            name: _without_numbers(value) if name in _NUMBER_FIELDS else value
            for name, value in fields.items()
        }
    ]
    values = 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            members = container.values() if type(container) is dict else container
            values += len(members)
            if values > MAX_VALUES or (outlined and MANY in members):
                raise too_many_values()
            inner += [m for m in members if (kind := type(m)) is dict or kind is list]
        if not inner:
            return
        level = inner
    raise too_deep()


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
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str | list | None) and _is_content(content)


def _is_content(content: object) -> bool:
    if not isinstance(content, list) or len(content) <= _FEW_MESSAGES:
        return True
    return all(isinstance(part, dict) for part in content)


def _without_numbers(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [
        [number for number in item if not _is_number(number)] if isinstance(item, list) else item
        for item in value
        if not _is_number(item)
    ]


def _is_number(value: object) -> bool:
    return type(value) is int or value is MANY


def too_deep() -> RefusedBodyError:
    """Return the refusal of a body that is nested too deeply."""
    return RefusedBodyError(
        400, "too_deep", f"The body is nested more than {MAX_DEPTH} levels deep."
    )
