"""Images, sounds and videos in the messages of a body. Their encoded bytes are no text."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from fleetkeeper_contract.bodies.reader import JsonBody

MEDIA_TOKENS: Final = 1024
"""Tokens that one item counts until the engine has counted them: those of an image of 1024 x 1024."""
_SOUND: Final = "input_audio"
"""An object with `data`. The value of each other item is a URL, or an object with one."""
_ITEMS: Final = frozenset({"image_url", "audio_url", "video_url", _SOUND})
"""Names in a part whose value no engine takes for text."""


class Media(NamedTuple):
    """The media of a body."""

    items: int
    encoded_bytes: int
    """Encoded bytes of items that are in the body itself."""


_NONE: Final = Media(0, 0)


def media_of(body: JsonBody) -> Media:
    """Return the media in the parts of messages: `messages` of chats, `input` of responses."""
    parts = _parts(body.fields.get("messages")) or _parts(body.fields.get("input"))
    if not parts:
        return _NONE
    items = encoded = 0
    for part in parts:
        for item in _ITEMS.intersection(part):
            items += 1
            encoded += _encoded_bytes(body, item, part[item])
    return Media(items, encoded)


def _parts(messages: object) -> list[dict[str, Any]]:
    """Return the parts of all messages that have any."""
    if type(messages) is not list:
        return []
    return [
        part
        for message in messages
        if type(message) is dict and type(content := message.get("content")) is list
        for part in content
        if type(part) is dict
    ]


def _encoded_bytes(body: JsonBody, name: str, value: object) -> int:
    if name == _SOUND:
        return body.length(value.get("data")) if type(value) is dict else 0
    url = value.get("url") if type(value) is dict else value
    return body.length(url) if body.begins(url, b"data:") else 0
