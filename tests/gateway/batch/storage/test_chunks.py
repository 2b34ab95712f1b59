"""Chunks cover the lines of a file, in order, and are small."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.model import MAX_CHUNK_BYTES, MAX_CHUNK_LINES, LineRef
from fleetkeeper_gateway.batch.storage import chunks
from tests.support.batch.batch_storage import lines

MIB = 1024 * 1024


@given(st.lists(st.integers(0, 2 * MAX_CHUNK_BYTES) | st.integers(0, 200), max_size=700))
def test_chunks_cover_all_lines_in_order_and_are_small(lengths: list[int]) -> None:
    firsts = chunks.cut(lengths)
    found = list(pairwise((*firsts, len(lengths))))
    assert [number for first, end in found for number in range(first, end)] == list(
        range(len(lengths))
    )
    for first, end in found:
        assert 1 <= end - first <= MAX_CHUNK_LINES
        assert end - first == 1 or sum(lengths[first:end]) <= MAX_CHUNK_BYTES


@pytest.mark.parametrize("firsts", [(1, 2), (0, 2, 2), (0, 3), (0, 2, 1)])
def test_chunks_that_do_not_cover_the_lines_are_refused(firsts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="3 lines"):
        chunks.LineIndex(chunks.encode(lines(3)), firsts)


def test_chunks_are_as_long_as_they_may_be() -> None:
    assert chunks.cut([10] * 600) == (0, 256, 512)
    assert chunks.cut([MIB] * 9) == (0, 4, 8)
    assert chunks.cut([1, 5 * MIB, 1, 1]) == (0, 1, 2)
    assert chunks.cut([]) == ()


def test_an_index_takes_12_bytes_a_line() -> None:
    some = [LineRef(0, 0, 17), LineRef(1, 2**33, 2**32 - 1), LineRef(2, 5, 0)]
    content = chunks.encode(some)
    assert len(content) == 36
    index = chunks.LineIndex(content, (0, 2))
    assert (list(index), index[-1], index[1:]) == (some, some[-1], some[1:])
    assert index.chunks == (range(2), range(2, 3))
    with pytest.raises(ValueError, match="multiple"):
        chunks.LineIndex(content[:-1], (0,))
    with pytest.raises(ValueError, match="without gaps"):
        chunks.encode(some[1:])
