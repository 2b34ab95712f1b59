"""The reader of bodies: the same values and the same refusals for every size.

A small text that cannot have too many values is parsed as it is, of any other one the outline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, NamedTuple

from fleetkeeper_contract.bodies.outline import (
    PART_BYTES,
    LongText,
    Many,
    Outline,
    not_a_number,
)
from fleetkeeper_contract.bodies.refused import (
    MAX_DEPTH,
    MAX_VALUES,
    RefusedBodyError,
    not_json,
    repeated_name,
    too_deep,
    too_many_values,
)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OF_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_NUMBER_FIELDS = frozenset(
    {"prompt", "input", "tokens", "prompt_token_ids", "allowed_token_ids", "stop_token_ids"}
)
_ESCAPED_BYTES: Final = len("\\u0000")
"""The longest way to write a character."""


class JsonBody(NamedTuple):
    """A body that was read. Long texts of a large one are left out."""

    fields: dict[str, Any]
    data: bytes | bytearray
    """The body itself."""

    def text(self, value: object, most: int) -> str | None:
        """Return a text, however it was read; None for anything else.

        Args:
            value: of the body.
            most: characters. A longer one is None too.
        """
        if isinstance(value, LongText):
            if value.length > _ESCAPED_BYTES * most:
                return None
            value = json.loads(self.data[value.start - 1 : value.start + value.length + 1])
        return value if isinstance(value, str) and len(value) <= most else None

    def length(self, value: object) -> int:
        """Return the bytes of a text, as far as they are known without counting them; 0 for others."""
        if isinstance(value, LongText):
            return value.length
        return len(value) if isinstance(value, str) else 0

    def begins(self, value: object, start: bytes) -> bool:
        """Return whether a text begins so."""
        if isinstance(value, LongText):
            return self.data.startswith(start, value.start, value.start + value.length)
        return isinstance(value, str) and value.startswith(start.decode())


class BodyReader:
    """Reads one body while it arrives, in turns that are short."""

    def __init__(self, within: str = "") -> None:
        self._within = within
        self._outline = Outline()
        self._value: Any = None
        self._is_parsed = False
        self.body: JsonBody | None = None
        """The body, once it was read."""

    def advance(self, data: bytes | bytearray, *, is_whole: bool) -> bool:
        """Take one turn. Return whether there may be another one now.

        Args:
            data: the body so far, from its beginning.
            is_whole: whether it is all of the body.

        Raises:
            RefusedBodyError: if it is not a JSON object, or exceeds a bound.
        """
        _refuse_other_encodings(data)
        if self._outline.advance(data, is_whole=is_whole):
            return True
        if not is_whole or self.body is not None:
            return False
        if not self._is_parsed:
            self._value, self._is_parsed = _parsed(self._outline), True
            return True
        self.body = self._checked(data)
        return False

    def _checked(self, data: bytes | bytearray) -> JsonBody:
        names, values = _count(self._value, self._within)
        if names != self._outline.names:
            raise repeated_name()
        body = _object_of(self._value, data)
        values += self._outline.left_out
        if values > MAX_VALUES:
            fields = body.fields.get(self._within) if self._within else body.fields
            numbers = token_numbers(fields) if isinstance(fields, dict) else 0
            if values - numbers > MAX_VALUES:
                raise too_many_values()
        return body


def read_body(data: bytes, *, within: str = "") -> JsonBody:
    """Read a whole body in one turn. A large one takes long: see `BodyReader`.

    Args:
        data: the body.
        within: the field that has the body, in a text that is more than a body.

    Raises:
        RefusedBodyError: if it is not a JSON object, or exceeds a bound.
    """
    if len(data) <= PART_BYTES:
        # Those in texts count too: it is a bound.
        parts = len(data) - len(data.translate(None, b"[{,"))
        if parts <= MAX_VALUES:
            return _read_small(data, within, may_be_deep=parts > MAX_DEPTH)
    reader = BodyReader(within)
    while reader.advance(data, is_whole=True):
        pass
    if reader.body is None:
        raise AssertionError("a body that is whole was read to its end")
    return reader.body


def token_numbers(fields: dict[str, Any]) -> int:
    """Return how many token numbers there are in place of texts."""
    count = 0
    for name, value in fields.items():
        if type(value) is list and name in _NUMBER_FIELDS:
            count += _numbers(value)
    return count


def _read_small(data: bytes, within: str, *, may_be_deep: bool) -> JsonBody:
    _refuse_other_encodings(data)
    try:
        value = _STRICT.decode(data.decode())
    except RecursionError:
        raise too_deep() from None
    except json.JSONDecodeError as error:
        # The error's own text may contain the body's.
        raise not_json(f"it is wrong at character {error.pos}") from None
    except UnicodeDecodeError as error:
        raise not_json(f"it is not UTF-8 at byte {error.start}") from None
    except RefusedBodyError:
        raise
    except ValueError:
        raise not_json("a number has too many digits") from None
    if may_be_deep:
        _count(value, within)
    return _object_of(value, data)


def _parsed(outline: Outline) -> object:
    try:
        return outline.value()
    except RecursionError:
        raise too_deep() from None
    except RefusedBodyError:
        raise
    except ValueError:
        raise not_json("a number has too many digits") from None


def _object_of(value: object, data: bytes | bytearray) -> JsonBody:
    if not isinstance(value, dict):
        raise RefusedBodyError(400, "invalid_json", "The body must be a JSON object.")
    return JsonBody(value, data)


def _refuse_other_encodings(data: bytes | bytearray) -> None:
    if data.startswith(_BYTE_ORDER_MARK):
        what = "begins with a byte order mark (U+FEFF). Send the JSON without it."
    elif data.startswith(_OF_UTF_16) or b"\0" in data[:4]:
        what = "is not UTF-8. Encode the JSON as UTF-8."
    else:
        return
    raise RefusedBodyError(400, "encoding_not_supported", f"The body {what}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise repeated_name()
    return fields


_STRICT = json.JSONDecoder(object_pairs_hook=_once, parse_constant=not_a_number)


def _count(value: object, within: str) -> tuple[int, int]:
    """Return the names and the values of a text, level by level.

    Raises:
        RefusedBodyError: if there are too many levels.
    """
    names = values = 0
    level: Iterable[object] = (value,)
    for _ in range(MAX_DEPTH + (2 if within else 1)):
        containers = [item for item in level if type(item) is dict or type(item) is list]
        if not containers:
            return names, values
        objects = [item for item in containers if type(item) is dict]
        lists = [item for item in containers if type(item) is list]
        count = sum(map(len, objects))
        names += count
        values += count + sum(map(len, lists))
        level = chain(chain.from_iterable(map(dict.values, objects)), chain.from_iterable(lists))
    raise too_deep()


def _numbers(values: list[Any], *, is_inner: bool = False) -> int:
    """Return the whole numbers of a list and of the lists in it."""
    kinds = list(map(type, values))
    count = kinds.count(int)
    if Many in kinds:
        count += sum(item.numbers for item in values if type(item) is Many)
    if list in kinds and not is_inner:
        count += sum(_numbers(item, is_inner=True) for item in values if type(item) is list)
    return count
