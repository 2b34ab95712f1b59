"""Prefill tokens and step time, as the scheduler counts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_engine.in_vllm.stats import (
    Flight,
    SchedulerRecord,
    prefill_tokens_of,
)
from tests.support.engine.scheduler_stand_in import outputs_of


def test_with_two_steps_under_way_time_is_not_counted_twice() -> None:
    """Asynchronous scheduling sends step n+1 before the output of n is there."""
    record = SchedulerRecord()
    steps = [object() for _ in range(4)]
    flights = [Flight(step, 1, 0.1 * n) for n, step in enumerate(steps)]
    record.record_schedule(flights[0])
    record.record_schedule(flights[1])
    record.record_output(steps[0], outputs_of(1), 0.3, work_left=True)
    record.record_schedule(flights[2])
    record.record_output(steps[2], outputs_of(1), 0.9, work_left=False)
    record.record_output(object(), outputs_of(1), 1.0, work_left=False)
    record.count()
    assert record._real[record._at["batch_time_sum"]] == pytest.approx(0.9)
    assert record._whole[record._at["worked_steps"]] == 2
    assert record.heartbeat.whole.tolist() == [3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("scheduled", "new", "expected"),
    [([1, 1, 1], [], 0), ([1, 300, 1], [], 300), ([1, 300, 2], [300, 2], 302), ([2], [2], 2)],
)
def test_prefill_tokens_are_told_from_decodes(
    scheduled: list[int], new: list[int], expected: int
) -> None:
    """New sequences prefill, and so does any chunk larger than a decode."""
    assert prefill_tokens_of(scheduled, new, 1, only_decodes=False) == expected
    assert prefill_tokens_of(scheduled, new, 1, only_decodes=True) == 0


@given(
    st.lists(st.integers(1, 5) | st.integers(1, 2048), max_size=80),
    st.integers(0, 80),
    st.integers(1, 4),
)
def test_prefill_tokens_are_all_but_the_decodes(
    scheduled: list[int], new: int, decode_tokens: int
) -> None:
    """Counted sequence by sequence: the first so many are new, what others take beyond a decode is prefill."""
    expected = sum(
        tokens for at, tokens in enumerate(scheduled) if at < new or tokens > decode_tokens
    )
    found = prefill_tokens_of(scheduled, scheduled[:new], decode_tokens, only_decodes=False)
    assert found == expected
