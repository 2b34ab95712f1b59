"""Batch limits are raised while steps are short and requests wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.autoscale.rules.batch.raises import step_up_possible
from fleetkeeper.autoscale.rules.batch.values import BatchMemory, BatchView
from fleetkeeper.autoscale.signals.samples import Gauges
from fleetkeeper.autoscale.types import Limits
from tests.support.autoscale.batch_cases import HELD, MEMORY, SETTINGS, decided, signals, windows
from tests.support.autoscale.control_cases import NOW

ROOM = {"queue_wait_s": 0.8, "batch_time_s": 0.045, "windows": windows(0.999, 0.999, 0.999, 0.999)}


@pytest.mark.promise("waits-larger-batches")
def test_room_and_waiting_requests_give_one_notch_more() -> None:
    """10% more sequences where the limit makes requests wait."""
    assert decided(BatchView(signals(**ROOM), SETTINGS)) == (Limits(70, 2048), "BatchTimeHeadroom")


def test_tokens_grow_where_sequences_are_not_the_limit() -> None:
    """40 of 64 sequences run, requests wait: prefill is what they wait for."""
    seen = signals(**ROOM, gauges=Gauges(running=80.0))
    assert decided(BatchView(seen, SETTINGS)) == (Limits(64, 3072), "BatchTimeHeadroom")


@pytest.mark.parametrize(
    ("case", "change", "memory"),
    [
        ("no request waits", {"signals": signals(**{**ROOM, "queue_wait_s": 0.1})}, MEMORY),
        ("the control breaker is open", {"may_raise": False}, MEMORY),
        ("requests are refused for overload", {"gated": True}, MEMORY),
        (
            "less than half is used",
            {"signals": signals(**ROOM, gauges=Gauges(running=60.0))},
            MEMORY,
        ),
        ("changed 29 s ago", {}, replace(MEMORY, changed=NOW - 29)),
        ("a canary failed lately", {}, replace(MEMORY, rest_until=NOW + 1)),
        (
            "only three windows",
            {"signals": signals(**{**ROOM, "windows": windows(1, 1, 1)})},
            MEMORY,
        ),
        (
            "one window has no room",
            {"signals": signals(**{**ROOM, "windows": windows(1, 1, 0.99, 1)})},
            MEMORY,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_limits_are_not_raised_when(
    case: str, change: dict[str, object], memory: BatchMemory
) -> None:
    """Never up in these cases."""
    view = replace(BatchView(signals(**ROOM), SETTINGS), **change)  # type: ignore[arg-type]
    assert decided(view, memory)[0] == HELD


@pytest.mark.parametrize("pending", [1, 4])
def test_limits_rise_while_replicas_are_on_their_way(pending: int) -> None:
    """A cold start takes minutes: room in batch time is used meanwhile, within the same bounds."""
    view = BatchView(signals(**ROOM), SETTINGS, pending=pending)
    assert (
        decided(view)
        == decided(replace(view, pending=0))
        == (Limits(70, 2048), "BatchTimeHeadroom")
    )
    assert step_up_possible(view, MEMORY)


@pytest.mark.promise("waits-larger-batches")
def test_short_steps_and_a_full_batch_grow_by_a_quarter() -> None:
    """W high, B low, KV low, R near M: the batch is too small."""
    view = BatchView(signals(queue_wait_s=0.8, batch_time_s=0.02), SETTINGS)
    assert decided(view) == (Limits(80, 2048), "BatchTimeHeadroom")


def test_a_batch_that_is_too_small_grows_while_requests_are_shed() -> None:
    """The load breaker opens before the objective breaks: it must not keep up the cause of it."""
    view = BatchView(signals(queue_wait_s=0.8, batch_time_s=0.02), SETTINGS, gated=True)
    assert decided(view) == (Limits(80, 2048), "BatchTimeHeadroom")
    assert decided(replace(view, may_raise=False))[0] == HELD
    assert not step_up_possible(view, MEMORY), "replicas are asked for all the same"


@pytest.mark.parametrize("kv", [0.86, 0.93])
def test_a_full_cache_is_not_widened(kv: float) -> None:
    """W high, B low, KV high: M down only if preempting or about to."""
    seen = signals(queue_wait_s=0.8, batch_time_s=0.02, kv_ratio_max=kv)
    limits, _ = decided(BatchView(seen, SETTINGS))
    assert limits.sequences == (64 if kv < 0.92 else 48)
