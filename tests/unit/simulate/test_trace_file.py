"""Traces: what is read, and what each malformed file says about itself."""

from __future__ import annotations

import gzip

import pytest

from fleetkeeper.simulate.loads.trace_file import BadTrace, parse_trace

HEADER = "t_s,input_tokens,output_tokens\n"
GOOD = (
    "t_s,client,input_tokens,output_tokens,tier\n5.5,a,100,20,realtime\n6,b,7,0,\n\n9,c,1,1,batch\n"
)


def test_a_trace_starts_at_zero_and_ignores_other_columns_and_blank_lines() -> None:
    trace = parse_trace("t.csv", GOOD.encode(), 1000)
    assert trace.rows == ((0.0, 0, 100, 20), (0.5, 1, 7, 0), (3.5, 2, 1, 1))
    assert (trace.has_tiers, trace.notes, trace.seconds) == (True, (), 3.5)


def test_gzip_is_read_by_its_content_and_a_byte_order_mark_is_dropped() -> None:
    content = gzip.compress(("\ufeff" + GOOD).encode())
    assert len(parse_trace("t.csv.gz", content, 1000).rows) == 3
    assert len(parse_trace("standard input", content, 1000).rows) == 3


def test_a_trace_without_tiers_is_standard() -> None:
    trace = parse_trace("t.csv", (HEADER + "0,1,1\n").encode(), 1000)
    assert (trace.rows, trace.has_tiers) == (((0.0, 1, 1, 1),), False)


def test_unsorted_rows_are_sorted_and_a_note_says_how_many() -> None:
    trace = parse_trace("t.csv", (HEADER + "3,1,1\n1,2,1\n2,3,1\n").encode(), 1000)
    assert [row[0] for row in trace.rows] == [0.0, 1.0, 2.0]
    (note,) = trace.notes
    assert "out of order: 1" in note
    assert "sorted" in note


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "t.csv: ", ("empty", "t_s, input_tokens, output_tokens")),
        ("\n \n", "t.csv: ", ("empty",)),
        (HEADER, "t.csv:1: ", ("no requests",)),
        ("t_s,input_tokens\n0,1\n", "t.csv:1: ", ("output_tokens is missing", "t_s, input_tokens")),
        (HEADER + "0,1,1\n1,x,1\n", "t.csv:3: input_tokens: ", ("'x'", "not a number")),
        (HEADER + "0,1\n", "t.csv:2: output_tokens: ", ("missing",)),
        (HEADER + "0,,1\n", "t.csv:2: input_tokens: ", ("missing",)),
        (HEADER + "\n-1,1,1\n", "t.csv:3: t_s: ", ("-1 is negative",)),
        (HEADER + "0,1,-5\n", "t.csv:2: output_tokens: ", ("-5 is negative",)),
        (HEADER + "nan,1,1\n", "t.csv:2: t_s: ", ("nan", "finite")),
        (HEADER + "0,inf,1\n", "t.csv:2: input_tokens: ", ("inf", "finite")),
        (HEADER + "0,1.5,1\n", "t.csv:2: input_tokens: ", ("1.5", "whole number")),
        (HEADER + "0,900,101\n", "t.csv:2: input_tokens + output_tokens: ", ("1001", "(1000)")),
        (
            "t_s,input_tokens,output_tokens,tier\n0,1,1,urgent\n",
            "t.csv:2: tier: ",
            ("'urgent'", "realtime, standard, batch"),
        ),
    ],
)
def test_a_malformed_trace_names_the_line_the_column_and_the_error(
    text: str, place: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(BadTrace) as caught:
        parse_trace("t.csv", text.encode(), 1000)
    assert str(caught.value).startswith(place)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("t.csv.gz", gzip.compress(GOOD.encode(), mtime=0)[:-12], "broken gzip"),
        ("t.csv.gz", b"\x1f\x8b\x08garbage that is no stream", "broken gzip"),
        ("t.csv.gz", GOOD.encode(), "not gzip"),
        ("t.csv", b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_reported(name: str, content: bytes, word: str) -> None:
    with pytest.raises(BadTrace, match=word):
        parse_trace(name, content, 1000)
