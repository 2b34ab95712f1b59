"""The outline of a large JSON text: what routing and admission need of it, without its long strings.

Only the outline is parsed: long strings are emptied and runs of numbers shortened, part by part, so
that no part blocks an event loop for more than a few milliseconds. The gateway and the engine's
middleware read large bodies in the same way, so a body that one refuses is refused by the other.
"""

from __future__ import annotations

import json
import re
from typing import Final

SMALL_BYTES: Final = 65_536
"""Larger bodies are outlined, in parts of this size."""
MAX_VALUES: Final = 20_000
"""Values in lists and objects. Lists of token numbers do not count."""
_MAX_OUTLINE_BYTES = 512 * 1024
_LONG_STRING_BYTES = 256
"""Every name that matters is shorter, however it is escaped."""
_FEW_BYTES = 4096
"""Parts up to this size are kept with all their numbers."""
_TOO_LONG = b" " * (_LONG_STRING_BYTES + 1)
"""The replacement of a longer string, which becomes empty because spaces are not kept."""
_LONG_RUN = 64
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


class Many:
    """The replacement of the middle of a long run of numbers."""


MANY: Final = Many()
"""It stands in an outline for the middle of a long run of numbers."""


def _constant(name: str) -> object:
    return MANY if name == "Infinity" else float(name)


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

    def fields(self, decoder: json.JSONDecoder | None = None) -> object:
        """Return the value of the outline, with long strings empty and long runs of numbers short.

        Args:
            decoder: reads the outline; it must read `Infinity` as a value of its own.

        Raises:
            ValueError: if the body is not JSON.
            RecursionError: if it is nested without end.
        """
        if self._in_string:
            raise ValueError("the text ends within a string")
        text = b"".join(self._kept)
        return (decoder or _DECODER).decode(text.decode("utf-8-sig", "surrogatepass"))

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


def too_many_values() -> RefusedBodyError:
    """Return the refusal of a body with too many lists, objects and values."""
    return RefusedBodyError(
        400,
        "too_many_values",
        f"The body has more than {MAX_VALUES} values. Send less in one request; "
        "only prompt, input and tokens may hold long lists of token numbers.",
    )
