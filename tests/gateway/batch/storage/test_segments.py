"""Segments and indexes: what was written is read, and what is torn is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.model import LineRef, Result
from fleetkeeper_gateway.batch.storage import line_index, segments
from tests.support.batch_storage import lines, results

_RESULTS = st.lists(
    st.builds(
        Result,
        line=st.integers(0, 2**32 - 1),
        attempt=st.integers(1, 2**16 - 1),
        fence=st.integers(0, segments.MAX_FENCE),
        ok=st.booleans(),
        text=st.binary(max_size=200),
    ),
    min_size=1,
    max_size=8,
)


@given(_RESULTS)
def test_a_segment_is_read_as_it_was_written(written: list[Result]) -> None:
    assert segments.decode(segments.encode(written)) == written


@given(_RESULTS, st.data())
def test_a_segment_that_is_cut_or_changed_is_torn(
    written: list[Result], data: st.DataObject
) -> None:
    content = segments.encode(written)
    cut = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(segments.TornSegment):
        segments.decode(content[:cut])
    with pytest.raises(segments.TornSegment):
        segments.decode(content[:cut] + bytes([content[cut] ^ 0x40]) + content[cut + 1 :])
    with pytest.raises(segments.TornSegment):
        segments.decode(content[:cut] + bytes(len(content) - cut) + b"x")


@pytest.mark.promise("batch-results")
def test_names_sort_by_the_lowest_fence() -> None:
    fences = [0, 9, 10, 11, 255, 256, 4096, 10**9, 2**48 - 1, segments.MAX_FENCE]
    names = [segments.new_name([*results([1], fence), *results([2], fence)]) for fence in fences]
    older = [f"{fence:012x}-0123456789a" for fence in fences if fence < 2**48]
    assert names == sorted(names)
    mixed = sorted([*names, *older], key=segments.order_of)
    assert [int(name.partition("-")[0], 16) for name in mixed] == sorted([*fences, *fences[:-1]])
    assert {len(name) for name in names} == {24}
    assert segments.new_name(results([1])) != segments.new_name(results([1]))


@pytest.mark.parametrize("fence", [-1, segments.MAX_FENCE + 1])
def test_a_fence_that_would_not_sort_is_refused(fence: int) -> None:
    with pytest.raises(ValueError, match="fence"):
        segments.new_name(results([1], fence))


def test_an_index_takes_12_bytes_a_line() -> None:
    some = [LineRef(0, 0, 17), LineRef(1, 2**33, 2**32 - 1), LineRef(2, 5, 0)]
    content = line_index.encode(some)
    assert len(content) == 36
    assert line_index.decode(content) == some
    with pytest.raises(ValueError, match="multiple"):
        line_index.decode(content[:-1])


def test_lines_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="without gaps"):
        line_index.encode(lines(3)[1:])
