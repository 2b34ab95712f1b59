"""The check of answers, against Python's reader."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.workers.json_text import is_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)
PIECES = (
    *'{}[],:"\\ \n\t01-+.eEu_/',
    "true", "false", "null", "NaN", "Infinity", '"a"', '"\\n"', '"\\u00e9"', '"a":', "1e5", "0.5",
    "[]", "{}", "[1,2]", '{"a":1}', "\x01", "\x02", "\x03", "\x04", "é", "\x00", "\x85", "\u2028",
)  # fmt: skip


def refuse(name: str) -> None:
    raise ValueError(name)


def python_reads(text: bytes) -> bool:
    """Return whether Python takes a text for JSON in UTF-8, without the constants that JSON has not."""
    try:
        json.loads(text.decode(), parse_constant=refuse, parse_int=str, parse_float=str)
    except ValueError:
        return False
    return True


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=14))
@example(["1", "\\", "n", "5"])
@example(["{", '"a":', "1", ",", "2", "}"])
@example(["{", '"a"', ",", '"a":', "1", "}"])
@example(["[", '"a":', "1", "]"])
@example(['"a":', "1"])
@example(["1", ",", "2"])
@example(["fal", '"a"', "se"])
@example(["[", "1", ",", "]"])
@example(['"', "\\", "ud800", '"'])
@example(['"', "\\", "\\", "ud800", '"'])
@example(['"', "\\", "ud83d", "\\", "ude00", "\\", "udc00", '"'])
@example(['"', "\\", "ud8", '"'])
def test_it_decides_as_python_does(pieces: list[str]) -> None:
    text = "".join(pieces).encode()
    assert is_json(text) == python_reads(text)


@given(
    VALUES,
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]),
    st.booleans(),
    st.tuples(st.integers(0, 400), st.binary(max_size=2)),
)
def test_what_is_json_is_taken_and_a_byte_that_is_changed_is_noticed(
    value: Any, separators: tuple[str, str], is_ascii: bool, change: tuple[int, bytes]
) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=is_ascii).encode()
    assert is_json(b" %b\n" % text)
    changed = bytearray(text)
    place, put = change
    changed[place : place + 1] = put
    assert is_json(bytes(changed)) == python_reads(bytes(changed))


def test_it_is_bounded_where_values_would_take_a_hundred_times_their_text() -> None:
    """An engine chooses its answers. Python makes 35 MiB of this one."""
    text = b"[" + b",".join([b'{"":{}}'] * 131_072) + b"]"
    tracemalloc.start()
    assert is_json(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000, peak


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 1_000_000,
        b"[" * 500_000 + b"]" * 500_000,
        b"[1," * 300_000 + b"1" + b"]" * 300_000,
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    ],
    ids=["open", "lists", "values", "objects"],
)
def test_what_is_nested_without_end_is_refused(text: bytes) -> None:
    assert not is_json(text)


def test_what_engines_answer_is_taken() -> None:
    embedding = [number / 7 for number in range(1024)]
    large = {"data": [{"embedding": embedding, "index": number} for number in range(64)]}
    deep: Any = 1
    for _ in range(200):
        deep = {"a": [deep]}
    for value in (large, deep, {"text": 'a "quoted" \\ text\n' * 50_000}, "x" * 300_000):
        assert is_json(json.dumps(value).encode())
        assert is_json(json.dumps(value, separators=(",", ":")).encode())
