"""Bounds on the messages of a body. Pure.

vLLM validates bodies in the event loop that also answers probes. Ten thousand wrong values in
`messages` take it more than a second, so the first one is refused here. Values and levels of every
body are bounded where it is read (fleetkeeper_contract.bodies).
"""

from __future__ import annotations

from typing import Final

from fleetkeeper_contract.bodies.outline import LongText
from fleetkeeper_contract.bodies.refused import RefusedBodyError

MAX_MESSAGES: Final = 2048
_FEW_MESSAGES = 64
"""Up to this many wrong messages are left to vLLM, which names every error in each."""


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
