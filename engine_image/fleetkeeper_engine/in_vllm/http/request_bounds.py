"""Bounds on a JSON body, checked without parsing all of a large one. Pure.

vLLM parses and validates bodies in the event loop that also answers probes. The time depends on the
number of values and on the depth, hardly on the length of strings. Ten thousand wrong values in
`messages` take it more than a second. A body may therefore be long, but may not have many small
parts.

Of a large body only an outline is parsed: long strings are emptied and runs of numbers shortened,
part by part, so that no part blocks the event loop for more than a few milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

SMALL_BYTES: Final = 65_536
"""Larger bodies are outlined, in parts of this size."""
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 20_000
"""Values in lists and objects. Lists of token numbers do not count."""
MAX_MESSAGES: Final = 2048
_FEW_MESSAGES = 64
"""Up to this many wrong messages are left to vLLM, which names every error in each."""
_MAX_OUTLINE_BYTES = 512 * 1024
_LONG_STRING_BYTES = 256
"""Every name that matters is shorter, however it is escaped."""
_FEW_BYTES = 4096
"""Parts up to this size are kept with all their numbers."""
_TOO_LONG = b" " * (_LONG_STRING_BYTES + 1)
"""The replacement of a longer string, which becomes empty because spaces are not kept."""
_LONG_RUN = 64
_MANY_COMMAS = 512
"""This many wrong messages take vLLM less than a tenth of a second."""
_NUMBER_FIELDS = frozenset(
    {"prompt", "input", "tokens", "prompt_token_ids", "allowed_token_ids", "stop_token_ids"}
)
_SPACE = b" \t\r\n"
_ESCAPES = ((b"\\\\", b"\0\0"), (b'\\"', b"\0\1"))
"""The escapes that can hide the end of a string, and their temporary replacements: bytes that JSON
does not allow."""
_NUMBER = rb"-?\d[-+.\deE]*+"
_RUN = re.compile(rb"(?<![-+.\deE])(%b)(?:,%b)*,(%b)" % (_NUMBER, _NUMBER, _NUMBER))


class RefusedBodyError(ValueError):
    """A body that is refused. The message is for its client."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class _Many:
    """The replacement of the middle of a long run of numbers."""


_MANY: Final = _Many()


def _constant(name: str) -> object:
    return _MANY if name == "Infinity" else float(name)


_DECODER = json.JSONDecoder(parse_constant=_constant)


class Outline:
    """A large JSON text without its long strings and long runs of numbers. Its parts arrive in order."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._length = 0
        self._escape = b""
        self._in_string = False
        self._string = b""
        """The beginning of the string in which the last part ended."""
        self._is_first = True

    def feed(self, part: bytes) -> None:
        """Add the next part.

        Raises:
            RefusedBodyError: if the body has too many values, or is not UTF-8.
        """
        if self._is_first:
            self._is_first = False
            _refuse_other_encodings(part)
        text = self._escape + part
        self._escape = _open_escape(text)
        text = text[: len(text) - len(self._escape)]
        for escape, stand_in in _ESCAPES:
            text = text.replace(escape, stand_in)
        # The pieces alternate between text outside and inside a string.
        pieces = text.split(b'"')
        pieces[0] = self._string + pieces[0]
        strings = slice(0 if self._in_string else 1, None, 2)
        pieces[strings] = [
            string if len(string) <= _LONG_STRING_BYTES else _TOO_LONG for string in pieces[strings]
        ]
        self._in_string ^= len(pieces) % 2 == 0
        self._string = pieces.pop() if self._in_string else b""
        if pieces:
            self._keep(b'"'.join(pieces) + (b'"' if self._in_string else b""))

    def fields(self) -> object:
        """Return the value of the outline, with long strings empty and long runs of numbers short.

        Raises:
            ValueError: if the body is not JSON.
            RecursionError: if it is nested without end.
        """
        if self._in_string:
            raise ValueError("the text ends within a string")
        text = b"".join(self._kept)
        return _DECODER.decode(text.decode("utf-8-sig", "surrogatepass"))

    def _keep(self, piece: bytes) -> None:
        for escape, stand_in in _ESCAPES:
            piece = piece.replace(stand_in, escape)
        kept = piece.translate(None, _SPACE)
        if len(kept) > _FEW_BYTES:
            kept = _RUN.sub(_shortened, kept)
        self._kept.append(kept)
        self._length += len(kept)
        if self._length > _MAX_OUTLINE_BYTES:
            raise too_many_values()


def _refuse_other_encodings(start: bytes) -> None:
    if b"\0" in start[:4] or start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise RefusedBodyError(
            400, "encoding_not_supported", "The body is not UTF-8. Encode the JSON as UTF-8."
        )


def _open_escape(text: bytes) -> bytes:
    """Return the backslash that escapes the beginning of the next part, if there is one."""
    return text[-1:] if (len(text) - len(text.rstrip(b"\\"))) % 2 else b""


def _shortened(run: re.Match[bytes]) -> bytes:
    # The outer numbers stay, because a part may begin or end in the middle of one.
    whole = run.group()
    return whole if whole.count(b",") < _LONG_RUN else b"%b,Infinity,%b" % run.groups()


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
            if values > MAX_VALUES or (outlined and _MANY in members):
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
    return type(value) is int or value is _MANY


def too_many_values() -> RefusedBodyError:
    """Return the refusal of a body with too many lists, objects and values."""
    return RefusedBodyError(
        400,
        "too_many_values",
        f"The body has more than {MAX_VALUES} values. Send less in one request; "
        "only prompt, input and tokens may hold long lists of token numbers.",
    )


def too_deep() -> RefusedBodyError:
    """Return the refusal of a body that is nested too deeply."""
    return RefusedBodyError(
        400, "too_deep", f"The body is nested more than {MAX_DEPTH} levels deep."
    )
