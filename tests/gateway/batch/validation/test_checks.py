"""What an input file is found to be, against a naive reference."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.model import Mistake
from fleetkeeper_gateway.batch.validation.checker import BadLine, LineChecker
from fleetkeeper_gateway.batch.validation.findings import (
    MAX_MISTAKES,
    Findings,
    decode_findings,
)
from fleetkeeper_gateway.batch.validation.lines import read_lines
from fleetkeeper_gateway.batch.validation.worker import check_file
from fleetkeeper_gateway.http.request_fields import parse_fields
from tests.support.batch.batch_api import CHAT, jsonl, line
from tests.support.batch.batch_reference import reference

MAX_LINES, MAX_LINE_BYTES = 12, 400


def found_in(data: bytes, max_lines: int = MAX_LINES, max_bytes: int = MAX_LINE_BYTES) -> Findings:
    """Return the findings as they arrive from another process."""
    findings = check_file(io.BytesIO(data), CHAT, max_lines=max_lines, max_line_bytes=max_bytes)
    return decode_findings(b"".join(findings.encode()))


def codes(data: bytes, max_bytes: int = 1_000_000) -> list[tuple[int | None, str]]:
    """Return line and code of each mistake."""
    return [(one.line, one.code) for one in found_in(data, 100, max_bytes).mistakes]


# -- files of random lines ----------------------------------------------------------------------------

odd_values: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        0.0,
        -1,
        "",
        "POST",
        "post",
        CHAT,
        "m",
        "x" * 300,
        "x" * 600,
        [],
        {},
        "\ud800",
    ]
) | st.text(max_size=5)
ids = st.sampled_from(["a", "b", "c", "d", "e", "é", "\u2028"]) | st.text(min_size=1, max_size=4)


@st.composite
def line_fields(draw: st.DrawFn) -> dict[str, Any]:
    """A line that is valid, or has an odd or a missing field."""
    body: dict[str, Any] = {"model": draw(st.sampled_from(["m", "m", "m", "other"]))}
    fields: dict[str, Any] = {"custom_id": draw(ids), "method": "POST", "url": CHAT, "body": body}
    change = draw(st.sampled_from(["none", "none", "value", "missing", "body", "extra"]))
    name = draw(st.sampled_from(sorted(fields)))
    if change == "value":
        fields[name] = draw(odd_values)
    elif change == "missing":
        del fields[name]
    elif change == "body":
        body[draw(st.sampled_from(["model", "stream", "n"]))] = draw(odd_values)
    elif change == "extra":
        fields["unknown"] = draw(odd_values)
    return fields


@st.composite
def json_lines(draw: st.DrawFn) -> bytes:
    """A line as text, sometimes with a few wrong bytes."""
    text = json.dumps(draw(line_fields()), ensure_ascii=draw(st.booleans()))
    data = text.encode("utf-8", "surrogatepass")
    change = draw(st.sampled_from(["none", "none", "none", "cut", "bytes", "twice", "constant"]))
    if change == "cut":
        data = data[: draw(st.integers(0, len(data)))]
    elif change == "bytes":
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(st.binary(max_size=3)) + data[place:]
    elif change == "twice":
        data = data.replace(b'"method": "POST"', b'"method": "POST", "method": "POST"')
    elif change == "constant":
        data = data.replace(
            b'"m"', draw(st.sampled_from([b"NaN", b"-Infinity", b"1e999", b"[[1]]"]))
        )
    return data


files = st.builds(
    lambda start, lines, end: start + b"".join(lines) + end,
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\n"]),
    st.lists(
        st.builds(
            bytes.__add__,
            json_lines()
            | st.binary(max_size=20)
            | st.sampled_from([b"", b" ", b"\t\r", b"x" * 500]),
            st.sampled_from([b"\n", b"\n", b"\r\n"]),
        ),
        max_size=16,
    ),
    st.sampled_from([b"", b"\r", b" ", jsonl([line(99)])[:-1]]),
)


@given(files)
def test_a_file_is_found_to_be_what_the_reference_says(data: bytes) -> None:
    found, expected = found_in(data), reference(data, CHAT, MAX_LINES, MAX_LINE_BYTES)
    assert found.lines == expected.lines
    assert [(one.line, one.code) for one in found.mistakes] == expected.mistakes
    assert found.model == expected.model
    if expected.mistakes:
        assert list(found.found_lines(0, found.lines)) == []
    else:
        places = [(one.offset, one.length) for one in found.found_lines(0, found.lines)]
        assert places == expected.places


@given(st.binary(max_size=60), st.integers(1, 12))
def test_lines_are_those_of_the_file(data: bytes, max_bytes: int) -> None:
    found = {one.number: one for one in read_lines(io.BytesIO(data), max_bytes)}
    for number, piece in enumerate(data.split(b"\n"), 1):
        start = sum(len(one) + 1 for one in data.split(b"\n")[: number - 1])
        text = piece.removesuffix(b"\r")
        if number == 1 and text.startswith(b"\xef\xbb\xbf"):
            start, text = start + 3, text[3:]
            if len(piece) > max_bytes:
                continue  # the mark may count to the length of its line
        if len(text) > max_bytes:
            assert found.pop(number).text is None
        elif text.strip(b" \t\r"):
            assert found.pop(number)[1:] == (start, text)
        else:
            assert number not in found
    assert all(number == 1 for number in found)


# -- one mistake after the other --------------------------------------------------------------------

BAD_LINES: list[tuple[str, bytes, str]] = [
    ("text", b"hello", "invalid_json_line"),
    ("list", b"[]", "invalid_json_line"),
    ("number", b"7", "invalid_json_line"),
    ("two objects", b"{} {}", "invalid_json_line"),
    ("mark in the middle", b"\xef\xbb\xbf{}", "invalid_json_line"),
    ("NaN", b'{"custom_id": NaN}', "invalid_json_line"),
    ("Infinity", b'{"custom_id": -Infinity}', "invalid_json_line"),
    ("control character", b'{"custom_id": "\x01"}', "invalid_json_line"),
    ("zero byte", b'{"custom_id": "\x00"}', "invalid_json_line"),
    ("5000 digits", b'{"custom_id": ' + b"1" * 5000 + b"}", "invalid_json_line"),
    ("UTF-16", '{"custom_id": "a"}'.encode("utf-16"), "invalid_utf8"),
    ("latin-1", b'{"custom_id": "\xe9"}', "invalid_utf8"),
    ("surrogate in UTF-8", b'{"custom_id": "\xed\xa0\x80"}', "invalid_utf8"),
    ("overlong", b'{"custom_id": "\xc0\x80"}', "invalid_utf8"),
    ("deep", b'{"custom_id": ' + b"[" * 9000 + b"]" * 9000 + b"}", "too_deep"),
    ("deep object", b'{"a":' * 20_000, "too_deep"),
    ("duplicate", b'{"custom_id": "a", "custom_id": "a"}', "duplicate_key"),
    ("nested duplicate", b'{"body": {"a": [{"b": 1, "b": 1}]}}', "duplicate_key"),
    ("escaped duplicate", b'{"body": {"a": 1, "\\u0061": 2}}', "duplicate_key"),
]


@pytest.mark.parametrize(
    ("text", "code"), [one[1:] for one in BAD_LINES], ids=[one[0] for one in BAD_LINES]
)
def test_a_bad_line_is_a_mistake_with_its_number(text: bytes, code: str) -> None:
    data = jsonl([line(1)]) + b"\n" + text + b"\n" + jsonl([line(2)])
    assert codes(data) == [(3, code)]


@pytest.mark.promise("batch-paths")
@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "\ud800"}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "line-1"}, "duplicate_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"method": None}, "invalid_method", "method"),
        ({"url": "/v1/completions"}, "invalid_url", "url"),
        ({"url": CHAT + "/"}, "invalid_url", "url"),
        ({"body": "text"}, "invalid_body", "body"),
        ({"body": {}}, "invalid_model", "body.model"),
        ({"body": {"model": "x" * 257}}, "invalid_model", "body.model"),
        ({"body": {"model": "\udfff"}}, "invalid_model", "body.model"),
        ({"body": {"model": "another"}}, "mismatched_model", "body.model"),
        ({"body": {"model": "m", "stream": True}}, "stream_not_supported", "body.stream"),
        ({"body": {"model": "m", "stream": 1}}, "stream_not_supported", "body.stream"),
        ({"body": {"model": "m", "stream": "true"}}, "stream_not_supported", "body.stream"),
    ],
)
def test_a_bad_field_is_a_mistake_of_its_line(
    changes: dict[str, Any], code: str, param: str
) -> None:
    found = found_in(jsonl([line(1), line(2, **changes), line(3)]), max_bytes=1000)
    assert [(one.line, one.code, one.param) for one in found.mistakes] == [(2, code, param)]


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    fields = line(1)
    del fields[name]
    (mistake,) = found_in(jsonl([fields])).mistakes
    assert (mistake.code, mistake.param) == ("missing_required_parameter", name)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "stream": False},
        {"model": "m", "stream": None},
        {"model": "m", "anything": {"the": ["engine", 1e308, -0.0]}},
        {"model": "m", "prompt": "\ud83d\ude00 \u2028 \x7f"},
    ],
)
def test_what_only_the_engine_understands_is_not_looked_at(body: dict[str, Any]) -> None:
    assert codes(jsonl([line(1, body=body, unknown=[{}])])) == []


def test_a_number_beyond_all_others_is_no_mistake() -> None:
    data = jsonl([line(1)]).replace(b'"model"', b'"x": 1e99999, "model"')
    assert codes(data) == []


def test_bounds_are_inclusive() -> None:
    lines = [line(1, custom_id="é" * 512), line(2, body={"model": "m"})]
    assert codes(jsonl(lines)) == []
    data = jsonl([line(number) for number in range(3)])
    longest = max(map(len, data.splitlines()))
    assert found_in(data, 3, longest).mistakes == []
    assert {one.code for one in found_in(data, 3, longest - 1).mistakes} == {"line_too_long"}
    assert [one.code for one in found_in(data, 2, longest).mistakes] == ["too_many_lines"]


@pytest.mark.parametrize("data", [b"", b"\n\r\n \t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_lines_is_a_mistake(data: bytes) -> None:
    assert codes(data) == [(None, "empty_file")]


@pytest.mark.parametrize("wrong", [99, 100, 101, 250])
def test_at_most_100_mistakes_are_reported_and_the_last_one_counts_the_rest(wrong: int) -> None:
    found = found_in(b"x\n" * wrong + jsonl([line(1)]), 1000)
    reported = found.reported()
    assert found.lines == wrong + 1
    if wrong <= MAX_MISTAKES:
        assert [one.line for one in reported] == list(range(1, wrong + 1))
    else:
        assert len(reported) == MAX_MISTAKES
        assert [one.line for one in reported[:-1]] == list(range(1, MAX_MISTAKES))
        more = wrong - MAX_MISTAKES + 1
        assert reported[-1] == Mistake("more_mistakes", f"{more} more lines have a mistake.")


def test_too_many_lines_are_reported_first_and_end_the_reading() -> None:
    found = found_in(b"x\n" * 500, 200)
    assert found.reported()[0].code == "too_many_lines"
    assert len(found.reported()) == MAX_MISTAKES
    assert (found.lines, found.read_all) == (200, False)


def test_a_message_that_was_cut_is_not_taken_for_findings() -> None:
    message = b"".join(
        check_file(io.BytesIO(jsonl([line(1)])), CHAT, max_lines=9, max_line_bytes=999).encode()
    )
    for end in range(len(message)):
        with pytest.raises(ValueError):
            decode_findings(message[:end])


# -- what a line asks for ---------------------------------------------------------------------------

limits = st.none() | st.integers(-5, 2_000_000) | st.sampled_from(["7", 1.5, True])


@given(
    limits,
    limits,
    limits,
    st.sampled_from(["/v1/chat/completions", "/v1/responses", "/v1/embeddings"]),
)
def test_a_line_asks_for_what_the_gateway_reads_from_its_body(
    max_tokens: object, max_completion_tokens: object, choices: object, endpoint: str
) -> None:
    body = {
        "model": "m",
        "max_tokens": max_tokens,
        "max_completion_tokens": max_completion_tokens,
        "n": choices,
    }
    text = json.dumps(line(1, url=endpoint, body=body), separators=(",", ":")).encode()
    sent = json.dumps(body, separators=(",", ":")).encode()
    assert LineChecker(endpoint).check(1, text) == parse_fields(sent, None, endpoint).asked


# -- large lines ------------------------------------------------------------------------------------

MIB = 1 << 20


def large(values: bytes) -> bytes:
    """Return a line with JSON in its body."""
    return jsonl([line(1)])[:-3] + b', "prompt": ' + values + b"}}\n"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (b'"' + b"x" * (2 * MIB) + b'"', []),
        (b'"' + "é😀".encode() * (MIB // 4) + b'"', []),
        (b'"' + b'\\"' * MIB + b'"', []),
        (b"[" + b"1234," * (MIB // 4) + b"1]", []),
        (b"[" + b"{}," * MIB + b"1]", [(1, "too_many_values")]),
        (b"[" * MIB, [(1, "too_many_values")]),
        (b'"' + b"x" * MIB, [(1, "invalid_json_line")]),
        (b'"' + b"x" * MIB + b"\xff" + b'"', [(1, "invalid_utf8")]),
    ],
    ids=["text", "wide text", "quotes", "numbers", "objects", "deep", "open", "utf-8"],
)
def test_a_large_line_is_read_as_a_small_one_is(
    values: bytes, expected: list[tuple[int, str]]
) -> None:
    assert codes(large(values), 16 * MIB) == expected


def test_a_mistake_names_the_line_before() -> None:
    checker = LineChecker(CHAT)
    checker.check(3, json.dumps(line(7)).encode())
    with pytest.raises(BadLine, match=r"Line 3 has the same custom_id\."):
        checker.check(5, json.dumps(line(7)).encode())
