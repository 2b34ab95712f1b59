"""A body means the same, and is valid or not, whatever its size: the reader against a strict JSON parser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.bodies import outline
from fleetkeeper_contract.bodies.outline import PART_BYTES, LongText, Many
from fleetkeeper_contract.bodies.reader import BodyReader, JsonBody, read_body
from fleetkeeper_contract.bodies.refused import MAX_VALUES, RefusedBodyError
from tests.support.lanes import examples

pytestmark = pytest.mark.slow

# -- the strict parser, and the comparison ----------------------------------------------------------


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it was written."""


def strictly_parsed(data: bytes) -> dict[str, Any] | str:
    """Return the body, or the code of its refusal. Of a few levels and values."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_Pairs, parse_constant=_refuse)
        fields = _object_of(value)
    except LookupError:
        return "duplicate_field"
    except ValueError:
        return "invalid_json"
    return fields if isinstance(fields, dict) else "invalid_json"


def _refuse(name: str) -> None:
    raise ValueError(name)


def _object_of(value: object) -> object:
    if isinstance(value, _Pairs):
        if len({name for name, _ in value}) != len(value):
            raise LookupError
        return {name: _object_of(one) for name, one in value}
    return [_object_of(one) for one in value] if isinstance(value, list) else value


def is_same(body: JsonBody, read: object, parsed: object) -> bool:
    """Return whether what was read of a value is that value, without what may be left out."""
    if isinstance(read, LongText):
        return body.text(read, 10**9) == parsed
    if isinstance(read, dict):
        return (
            isinstance(parsed, dict)
            and list(read) == list(parsed)
            and all(is_same(body, one, parsed[name]) for name, one in read.items())
        )
    if isinstance(read, list):
        return isinstance(parsed, list) and _are_same(body, read, parsed)
    return type(read) is type(parsed) and repr(read) == repr(parsed)


def _are_same(body: JsonBody, read: list[Any], parsed: list[Any]) -> bool:
    place = 0
    for one in read:
        size = one.numbers if isinstance(one, Many) else 1
        part = parsed[place : place + size]
        place += size
        if isinstance(one, Many):
            if [type(number) for number in part] != [int] * size:
                return False
        elif not part or not is_same(body, one, part[0]):
            return False
    return place == len(parsed)


def pieces_of(data: bytes, sizes: list[int]) -> Iterator[int]:
    """Yield how much of a body has arrived, part by part."""
    place = turn = 0
    while place < len(data):
        place = min(len(data), place + sizes[turn % len(sizes)])
        turn += 1
        yield place


def read_in_pieces(data: bytes, sizes: list[int]) -> JsonBody:
    """Read a body that arrives in pieces, by its outline."""
    reader, arrived = BodyReader(), bytearray()
    for end in pieces_of(data, sizes):
        arrived += data[len(arrived) : end]
        while reader.advance(arrived, is_whole=end == len(data)):
            pass
    while reader.advance(arrived, is_whole=True):
        pass
    assert reader.body is not None
    return reader.body


def assert_agrees(data: bytes, body: JsonBody | str) -> None:
    """Check that the reader takes what the parser takes, with the same values, and nothing else."""
    parsed = strictly_parsed(data)
    if isinstance(body, str):
        # A body with two mistakes is refused for either of them.
        codes = (parsed, "encoding_not_supported", "duplicate_field")
        assert isinstance(parsed, str), data
        assert body in codes, data
    else:
        assert is_same(body, body.fields, parsed), data


def read_or_code(data: bytes, sizes: list[int] | None = None) -> JsonBody | str:
    """Return the body, or the code of its refusal."""
    try:
        return read_body(data) if sizes is None else read_in_pieces(data, sizes)
    except RefusedBodyError as refused:
        return refused.code


# -- bodies -----------------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from('a"\\\n/é😀\u2028\x7f{[:,1 '), max_size=12) | st.builds(
    str.__mul__, st.sampled_from(["a", '"', "\\", "é", "\n", "NaN"]), st.integers(20, 90)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS | st.lists(st.integers(), max_size=60),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", "\r\n  :")])
INSERTED = st.sampled_from(
    [
        *(
            b'"',
            b"\\",
            b",",
            b":",
            b" ",
            b"1",
            b"01,",
            b"-",
            b"NaN",
            b"Infinity",
            b"\0",
            b"\1",
            b"\n",
        ),
        *(b"\xff", b"{}", b"[", b"]", b"}", b"\\u12", b"\x0b", b'"model":"n",', b"\xef\xbb\xbf"),
    ]
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A body, however it may be written, and sometimes with a mistake."""
    fields = {"model": "m", **draw(st.dictionaries(TEXTS, VALUES, max_size=4))}
    text = json.dumps(
        fields,
        ensure_ascii=draw(st.booleans()),
        separators=draw(SEPARATORS),
        indent=draw(st.sampled_from([None, None, 3])),
    )
    data = draw(st.sampled_from([b"", b" \n"])) + text.encode()
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(st.sampled_from([0, 0, 1, 3]))
        data = data[:start] + draw(INSERTED) + data[end:]
    return data


@examples(400)
@given(bodies(), st.integers(8, 200), st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_the_reader_agrees_with_a_strict_parser_wherever_a_part_ends(
    data: bytes, part_bytes: int, sizes: list[int]
) -> None:
    """In a name, an escape, a number, a character of several bytes, a quote, or between all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "PART_BYTES", part_bytes)
        patch.setattr(outline, "_SHORT_BYTES", part_bytes // 4)
        patch.setattr(outline, "_REREAD_BYTES", part_bytes // 3)
        patch.setattr(outline, "_MIN_RUN", 3)
        in_parts = read_or_code(data, sizes)
    assert_agrees(data, in_parts)
    assert_agrees(data, read_or_code(data))
    assert isinstance(in_parts, str) == isinstance(read_or_code(data), str)


@examples(60)
@given(
    bodies(),
    st.integers(-300, 300),
    st.sampled_from([b"x", b"\\n", "é".encode(), b" ", b"1,"]),
    st.booleans(),
)
def test_the_reader_agrees_with_a_strict_parser_around_the_size_of_a_part(
    data: bytes, beyond: int, filling: bytes, is_first: bool
) -> None:
    """One byte more never changes what a body means."""
    count = (PART_BYTES + beyond - len(data)) // len(filling)
    field = b'"tokens":' + (
        b"[" + filling * count + b"1]" if filling == b"1," else b'"' + filling * count + b'"'
    )
    start, end = data.find(b"{") + 1, data.rfind(b"}")
    data = (
        data[:start] + field + b"," + data[start:]
        if is_first
        else data[:end] + b"," + field + data[end:]
    )
    assert_agrees(data, read_or_code(data))


# -- what a body means never depends on its size ----------------------------------------------------

SIZES = {
    "small": b"",
    "of many parts": b'"w":[' + b"[]," * 10_500 + b"{}],",
    "just larger than a part": b'"user":"' + b"u" * PART_BYTES + b'",',
    "large": b'"user":"' + b"u" * 10 * PART_BYTES + b'",',
}
MISTAKES = [
    (b'{%b"model": "a"}', None),
    (b'\n {%b"model": "a"} \r\n', None),
    (b'{%b"model": "ch at"}', None),
    (b'{%b"m\\u006fdel": "\\u0061"}', None),
    (b'{%b"model": "a\\"b\\\\"}', None),
    (b'{"model": "a", %b"stop": "\\ud800"}', None),
    (b'\xef\xbb\xbf{%b"model": "a"}', "encoding_not_supported"),
    (b'\xff\xfe{%b"model": "a"}', "encoding_not_supported"),
    (b'{"model": "a", %b"model": "a"}', "duplicate_field"),
    (b'{"model": "a", %b"mod\\u0065l": "a"}', "duplicate_field"),
    (b'{%b"x": [{"%b": 1, "%b": 2}]}' % (b"%b", b"n" * 300, b"n" * 300), "duplicate_field"),
    (b'{%b"x": {"y": 1, "y": 1}}', "duplicate_field"),
    (b'{%b"model": 1 2}', "invalid_json"),
    (b'{%b"model": tr ue}', "invalid_json"),
    (b'{%b"model": "a" "b"}', "invalid_json"),
    (b'{%b"model": 01}', "invalid_json"),
    (b'{%b"model": +1}', "invalid_json"),
    (b'{%b"model": .5}', "invalid_json"),
    (b'{%b"model": NaN}', "invalid_json"),
    (b'{%b"model": -Infinity}', "invalid_json"),
    (b'{%b"model": "a\nb"}', "invalid_json"),
    (b'{%b"model": "%b\tb"}' % (b"%b", b"x" * 500), "invalid_json"),
    (b'{%b"model": "a\0b"}', "invalid_json"),
    (b'{%b"model": "a\0\1"}', "invalid_json"),
    (b'{%b"model": "\\x"}', "invalid_json"),
    (b'{%b"model": "%b\\u12g4"}' % (b"%b", b"x" * 500), "invalid_json"),
    (b'{%b"model": "\xff"}', "invalid_json"),
    (b'{%b"model": "\xed\xa0\x80"}', "invalid_json"),
    (b'{%b"x": [1, 2,, 3]}', "invalid_json"),
    (b'{%b"x": [%b, 007, %b]}' % (b"%b", b"1," * 40 + b"1", b"1," * 40 + b"1"), "invalid_json"),
    (b'{%b"x": [%b, 1 2, %b]}' % (b"%b", b"1," * 40 + b"1", b"1," * 40 + b"1"), "invalid_json"),
    (b'{%b"x": %b}' % (b"%b", b"1," * 40 + b"1"), "invalid_json"),
    (b'{%b"x": %b}' % (b"%b", b"1" * 5000), "invalid_json"),
    (b'{%b"model": "a"', "invalid_json"),
    (b'{%b"model": "a"} "', "invalid_json"),
    (b'{%b"model": "a"} {}', "invalid_json"),
    (b'[%b"model"]', "invalid_json"),
    (b'{%b"model": "a",}', "invalid_json"),
    (b'{%b"model": "a"\x0c}', "invalid_json"),
    (b'{%b"x": ' + b"[" * 63 + b"]" * 63 + b"}", None),
    (b'{%b"x": ' + b"[" * 64 + b"]" * 64 + b"}", "too_deep"),
    (b'{%b"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "too_deep"),
    (b'{%b"x": "' + b"[" * 100 + b'"}', None),
]


@pytest.mark.promise("strict-parser")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("form", "code"), MISTAKES)
def test_a_body_is_valid_or_not_whatever_its_size(form: bytes, code: str | None, size: str) -> None:
    data = form.replace(b"%b", SIZES[size], 1)
    body = read_or_code(data)
    assert (body if isinstance(body, str) else None) == code
    if code is None:
        assert_agrees(data, body)


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(RefusedBodyError, match="byte order mark"):
        read_body(b'\xef\xbb\xbf{"model": "m"}')


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["n", "n" * 3000])
def test_a_name_is_one_however_long_it_is(name: str, size: str) -> None:
    written = json.dumps(name).encode()
    data = (
        b"{"
        + SIZES[size]
        + b'"x": {'
        + written
        + b":1,"
        + written[:-1]
        + b'2":"'
        + b"y" * 99
        + b'"}}'
    )
    body = read_body(data)
    assert list(body.fields["x"]) == [name, name + "2"]


def numbers(count: int, one: bytes = b"7") -> bytes:
    return b",".join([one] * count)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(
    ("form", "most"),
    [
        # Values beside those of the form are the names of the body, and what is in SIZES.
        (lambda count: b'"a":[' + numbers(count) + b"]", MAX_VALUES - 3),
        (lambda count: b'"a":[' + numbers(count, b"[]") + b"]", MAX_VALUES - 3),
        (lambda count: b'"a":[' + numbers(count, b"{ }") + b"]", MAX_VALUES - 3),
        (lambda count: b'"a":[' + numbers(count, b'""') + b"]", MAX_VALUES - 3),
        (lambda count: b'"a":[' + numbers(count, b"0.5") + b"]", MAX_VALUES - 3),
        (lambda count: b'"a":[' + numbers(count // 2, b"[1]") + b"]", MAX_VALUES - 3),
        (lambda count: b'"prompt":[' + numbers(5 * count) + b"]", None),
        (lambda count: b'"input":[' + numbers(count // 50, b"[%b]" % numbers(50)) + b"]", None),
    ],
)  # fmt: skip
def test_values_are_counted_alike_whatever_the_size(form: Any, most: int | None, size: str) -> None:
    """Only in lists of token numbers any number of values is allowed."""
    start = b"{" + SIZES[size] + (b'"user":"",' if not SIZES[size] else b"")
    end = b',"model":"m"}'
    count = most or 2 * MAX_VALUES
    assert isinstance(read_or_code(start + form(count) + end), JsonBody)
    more = read_or_code(start + form(count + 2) + end)
    assert more == "too_many_values" if most else isinstance(more, JsonBody)
