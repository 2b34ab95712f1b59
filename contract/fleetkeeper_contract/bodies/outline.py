"""The outline of a large JSON text: its names and short values, and the places of its long texts.

Only the outline is parsed. The text is read in parts, so that none holds an event loop for more than a
few milliseconds. Each byte is checked: the outline is JSON if and only if the text is.
"""

from __future__ import annotations

import codecs
import json
import re
from itertools import accumulate
from typing import Final, NamedTuple

from fleetkeeper_contract.bodies.refused import MAX_VALUES, not_json, too_many_values

PART_BYTES: Final = 65_536
"""Bytes that are read in one turn of an event loop."""
_MAX_OUTLINE_BYTES = 2 * 1024**2
_MAX_NUMBERS = 2 * MAX_VALUES
"""Numbers of short lists, which are parsed beside the other values."""
_SHORT_BYTES = 64
"""Longer texts are left out. `NaN` stands for them, which JSON does not have."""
_REREAD_BYTES = 4096
"""A text whose beginning is at most this long is read again with the next part."""
_MIN_RUN = 16
"""Longer runs of whole numbers are left out but for both ends. `Infinity` stands for their middle."""

_SPACE = b" \t\r\n"
_WIDE = (b"  ", b"\t", b"\r", b"\n")
_SPACES = re.compile(rb"[ \t\r\n]{2,}")
_ESCAPES = ((b"\\\\", b"\0\0"), (b'\\"', b"\0\1"))
"""The escapes that can hide the end of a text, and their temporary replacements: bytes that JSON does
not allow."""
_CUT_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_BAD_ESCAPE = re.compile(rb"\\(?![nt/rbf]|u[0-9a-fA-F]{4})")
_CONTROL = bytes(set(range(32)) - set(_SPACE))
_RUN = re.compile(rb"[0-9, \t\r\n-]{32,}")
_AFTER_NUMBERS = tuple(b"%d," % digit for digit in range(10))
_EMPTY = (b"[]", b"[ ]", b"{}", b"{ }")
_NUMBERS = json.JSONDecoder()


class LongText(NamedTuple):
    """The place of a text that is left out: the bytes between its quotes, as written."""

    start: int
    length: int


class Many(NamedTuple):
    """The middle of a long run of whole numbers."""

    numbers: int


def not_a_number(name: str) -> object:
    """Refuse a constant that JSON does not have."""
    raise not_json(f"JSON has no {name}")


class Outline:
    """The outline of one text. What it counts is outside of texts, where only structure is."""

    def __init__(self) -> None:
        self._at = 0
        """The bytes that were read."""
        self._ended = False
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._has_escapes = self._has_space = False
        self._open: LongText | None = None
        """The long text in which the last part ended."""
        self._long: list[LongText] = []
        self._many: list[Many] = []
        self._values = 0
        self._numbers = 0
        self.names = 0
        """The names in all objects, as often as they are written."""

    def advance(self, data: bytes | bytearray, *, is_whole: bool) -> bool:
        """Read the next part. Return False if there is none yet.

        Parts have the same sizes however the text arrived, and so do their outlines.

        Args:
            data: the text so far, from its beginning.
            is_whole: whether it is all of the text.

        Raises:
            RefusedBodyError: if the part cannot be JSON, or there are too many values.
        """
        left = len(data) - self._at
        if self._ended or (left < PART_BYTES and not is_whole):
            return False
        is_last = is_whole and left <= PART_BYTES
        part = bytes(data[self._at : self._at + PART_BYTES])
        try:
            _, whole = codecs.utf_8_decode(part, "strict", is_last)
        except UnicodeDecodeError as error:
            raise not_json(f"it is not UTF-8 at byte {self._at + error.start}") from None
        self._at += self._read(part[:whole], data, is_last)
        self._ended = is_last
        return True

    def value(self) -> object:
        """Return the value of the outline, with `LongText` and `Many` for what is left out.

        Raises:
            RefusedBodyError: if the text is not JSON.
            RecursionError: if it is nested without end.
        """
        stand_ins = {"NaN": iter(self._long), "Infinity": iter(self._many), "-Infinity": iter(())}

        def stand_in(name: str) -> object:
            found = next(stand_ins[name], None)
            # One more than were left out: the text has one itself.
            return not_a_number(name) if found is None else found

        decoder = json.JSONDecoder(parse_constant=stand_in)
        try:
            return decoder.decode(b"".join(self._kept).decode())
        except json.JSONDecodeError as error:
            # Its text and its place are those of the outline.
            raise not_json("its structure is wrong") from error

    @property
    def left_out(self) -> int:
        """Return the numbers that are left out, but for one of each run."""
        return sum(many.numbers - 1 for many in self._many)

    def _read(self, text: bytes, data: bytes | bytearray, is_last: bool) -> int:
        """Add a part. Return the bytes of it that were read: up to a place where it can be cut."""
        if len(text.translate(None, _CONTROL)) != len(text):
            raise not_json("it has a control character")
        self._has_escapes = b"\\" in text
        self._has_space = b"\n" in text or b"\t" in text or b"\r" in text
        text = self._without_escapes(text)
        if not is_last:
            text = _up_to_a_cut(text)
        if self._has_escapes and _BAD_ESCAPE.search(text):
            raise not_json("it has an escape that JSON does not have")
        # The pieces are alternately outside and inside of a text.
        pieces = text.split(b'"') if self._open is None else [b"", *text.split(b'"')]
        read, cut = len(text), None
        if len(pieces) % 2 == 0:
            if is_last:
                raise not_json("it ends within a text")
            cut = pieces.pop()
            if len(cut) <= _REREAD_BYTES and len(cut) + 1 < read:
                read, cut = read - len(cut) - 1, None
        if cut is not None and self._open is not None and len(pieces) == 1:
            self._begin(cut, self._open)
            return read
        self._leave_out_texts(pieces, data)
        if cut is not None:
            self._begin(cut, LongText(self._at + read - len(cut), 0))
        self._leave_out_numbers(pieces)
        self._keep(self._with_escapes(b'"'.join(pieces).replace(b'"\0"', b"NaN")))
        return read

    def _begin(self, piece: bytes, before: LongText) -> None:
        """Add the end of a part to the long text that it begins or continues."""
        self._check_text(piece)
        self._open = LongText(before.start, before.length + len(piece))

    def _leave_out_texts(self, pieces: list[bytes], data: bytes | bytearray) -> None:
        """Replace long texts that are values. Names stay: they decide what a value means."""
        begun, self._open = self._open, None
        long = [
            place
            for place in range(1, len(pieces), 2)
            if len(pieces[place]) > _SHORT_BYTES or (begun is not None and place == 1)
        ]
        if not long:
            return
        ends = list(accumulate(map(len, pieces)))
        first = self._at if begun is None else self._at - 1
        for place in long:
            text = LongText(first + ends[place - 1] + place, len(pieces[place]))
            if begun is not None and place == 1:
                text = LongText(begun.start, begun.length + text.length)
            if pieces[place + 1].lstrip(_SPACE).startswith(b":"):
                written = bytes(data[text.start : text.start + text.length])
                pieces[place] = self._without_escapes(written)
            else:
                self._check_text(pieces[place])
                self._long.append(text)
                pieces[place] = b"\0"

    def _check_text(self, piece: bytes) -> None:
        """Check a piece of a text that is not parsed, beyond what is checked of every part."""
        if self._has_space and (b"\n" in piece or b"\t" in piece or b"\r" in piece):
            raise not_json("it has a control character")

    def _without_escapes(self, text: bytes) -> bytes:
        if self._has_escapes:
            for escape, stand_in in _ESCAPES:
                text = text.replace(escape, stand_in)
        return text

    def _with_escapes(self, text: bytes) -> bytes:
        if self._has_escapes:
            for escape, stand_in in _ESCAPES:
                text = text.replace(stand_in, escape)
        return text

    def _leave_out_numbers(self, pieces: list[bytes]) -> None:
        """Shorten spaces and runs of numbers between texts, and count what is left."""
        structure = b'"'.join(pieces[::2])
        runs: list[bytes] = []
        shorter = _RUN.sub(lambda run: self._shortened(run.group(), runs), structure)
        if runs:
            _check_numbers(b",".join(runs))
        if any(map(shorter.__contains__, _WIDE)):
            shorter = _SPACES.sub(b" ", shorter)
        if len(shorter) != len(structure):
            pieces[::2] = shorter.split(b'"')
        self.names += shorter.count(b":")
        self._values += shorter.count(b",") + shorter.count(b"[") + shorter.count(b"{")
        self._values -= sum(map(shorter.count, _EMPTY)) + 2 * len(runs)
        self._numbers += sum(map(shorter.count, _AFTER_NUMBERS))
        if self._values - self._numbers > MAX_VALUES or self._numbers > _MAX_NUMBERS:
            raise too_many_values()

    def _shortened(self, run: bytes, runs: list[bytes]) -> bytes:
        """Return a run of numbers without its middle, which is added to the others."""
        if run.count(b",") < _MIN_RUN:
            return run
        # The numbers at both ends may be parts of longer ones.
        start, end = run.index(b",") + 1, run.rindex(b",")
        runs.append(run[start:end])
        self._many.append(Many(runs[-1].count(b",") + 1))
        return run[:start] + b"Infinity" + run[end:]

    def _keep(self, piece: bytes) -> None:
        self._kept.append(piece)
        self._kept_bytes += len(piece)
        if self._kept_bytes > _MAX_OUTLINE_BYTES:
            raise too_many_values()


def _up_to_a_cut(text: bytes) -> bytes:
    """Return a part without an escape that is cut, and without a quote whose meaning comes later.

    A text is a name if a colon follows.
    """
    cut = _CUT_ESCAPE.search(text, max(0, len(text) - len(b"\\u000")))
    if cut is not None:
        text = text[: cut.start()]
    bare = text.rstrip(_SPACE)
    return bare[:-1] if bare.endswith(b'"') and len(bare) > 1 else text


def _check_numbers(numbers: bytes) -> None:
    """Check numbers that are not kept: they are parsed, and thrown away."""
    try:
        _NUMBERS.decode(f"[{numbers.decode()}]")
    except json.JSONDecodeError:
        raise not_json("it has a number that JSON does not have") from None
