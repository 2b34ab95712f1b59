"""The prompt of a conversation."""

from __future__ import annotations

from collections.abc import Iterable

from fleetkeeper_engine.simulated.http.bodies import Message
from fleetkeeper_engine.simulated.http.errors import RefusedRequestError
from fleetkeeper_engine.simulated.tokens import BOS, EOS, encode


def rendered(messages: Iterable[Message], model: str, *, asks: bool = True) -> list[int]:
    """Return the tokens of a conversation. `asks`: they end where the answer begins.

    Raises:
        RefusedRequestError: if a message has anything but text.
    """
    found = [BOS]
    for message in messages:
        found += [*encode(f"{message.role}\n{_text(message, model)}"), EOS]
    return [*found, *encode("assistant\n")] if asks else found


def _text(message: Message, model: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    if any(part.get("type", "text") not in ("text", "input_text") for part in message.content):
        raise RefusedRequestError(f"{model} is not a multimodal model")
    return "\n".join(str(part.get("text", "")) for part in message.content)
