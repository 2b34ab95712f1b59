"""The backlog of the batch process: what is believed, for how long, and what it hides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fleetkeeper.autoscale.signals.backlog import Backlog, known_backlog
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import Grade
from tests.support.autoscale.control_cases import NOW


def backlog(
    tokens: float = 1e6, *, due_s: float = 3600.0, rate: float | None = None, at: float = NOW
) -> Backlog:
    """A backlog that was scraped at a time, with a deadline so long after NOW."""
    return Backlog(tokens, NOW + due_s, tokens / due_s if rate is None else rate, at)


@pytest.mark.parametrize(("age_s", "is_known"), [(-5.0, True), (-5.1, False), (0.0, True), (60.0, True), (60.1, False)])  # fmt: skip
def test_a_backlog_counts_for_a_minute(age_s: float, is_known: bool) -> None:
    """As old as samples of engines may be, and as far ahead of this clock."""
    found = backlog(at=NOW - age_s)
    assert known_backlog(found, None, NOW) == (found if is_known else None)


@pytest.mark.parametrize(
    "reading",
    [
        Backlog(math.nan, NOW + 60, 1.0, NOW),
        Backlog(-1.0, NOW + 60, 1.0, NOW),
        Backlog(math.inf, NOW + 60, 1.0, NOW),
        Backlog(1.0, math.nan, 1.0, NOW),
        Backlog(1.0, -1.0, 1.0, NOW),
        Backlog(1.0, 1e300, 1.0, NOW),
        Backlog(1.0, NOW + 60, math.nan, NOW),
        Backlog(1.0, NOW + 60, -1.0, NOW),
        Backlog(1.0, NOW + 60, 1.0, math.nan),
    ],
)
def test_an_impossible_backlog_is_as_none(reading: Backlog) -> None:
    """And does not replace the last possible one."""
    assert known_backlog(reading, None, NOW) is None
    assert known_backlog(reading, backlog(at=NOW - 5), NOW) == backlog(at=NOW - 5)


def test_a_rate_may_be_infinite() -> None:
    """A deadline has passed: how many replicas that needs is bounded elsewhere."""
    late = backlog(rate=math.inf)
    assert known_backlog(late, None, NOW) == late


def test_the_newest_counts_and_outlives_its_series_for_a_minute() -> None:
    old, new = backlog(2e6, at=NOW - 30), backlog(1e6, at=NOW - 15)
    assert known_backlog(new, old, NOW) == new
    assert known_backlog(old, new, NOW) == new
    assert known_backlog(None, new, NOW + 45) == new
    assert known_backlog(None, new, NOW + 46) is None


def test_one_of_before_the_clock_was_set_back_does_not_count() -> None:
    """It would look newer than every later one until the clock is there again."""
    ahead, new = backlog(9e9, at=NOW + 3600.0), backlog(1e6, at=NOW)
    assert known_backlog(new, ahead, NOW) == new
    assert known_backlog(None, ahead, NOW) is None
    near = backlog(2e6, at=NOW + 5.0)
    assert known_backlog(new, near, NOW) == near


def signals(**rates: float) -> Signals:
    """Two pods that run 40 sequences, with these rates."""
    return Signals(
        Grade.FRESH,
        1.0,
        2,
        2,
        rates=Counters(**rates),
        gauges=Gauges(running=40.0, waiting_batch=9.0, oldest_wait_s_batch=3.0),
        queue_wait_s=0.4,
        waiting=9.0,
        kv_ratio=0.8,
    )


def test_without_batch_its_share_of_what_runs_is_left_out() -> None:
    """A quarter of the scheduled requests are of other tiers, so a quarter of the sequences are."""
    seen = signals(
        arrivals_standard=1, arrivals_batch=8, wait_count_standard=1, wait_count_batch=3
    ).without_batch()
    assert (seen.gauges.running, seen.kv_ratio, seen.waiting) == (10.0, 0.2, 0.0)
    assert seen.arrivals_per_s == 1.0
    assert seen.queue_wait_s == 0.4, "that of the other tiers"
    assert not seen.idle


def test_batch_alone_is_an_idle_service() -> None:
    """Nobody waits for its queue, and nothing of what runs needs a replica."""
    seen = signals(arrivals_batch=8, wait_count_batch=3).without_batch()
    assert (seen.queue_wait_s, seen.gauges.running) == (0.0, 0.0)
    assert seen.idle


def test_signals_without_batch_stay_as_they_are() -> None:
    """If none arrives, runs or waits."""
    plain = signals(arrivals_standard=4, wait_count_standard=4)
    gauges = plain.gauges._replace(waiting_batch=0.0, oldest_wait_s_batch=0.0, waiting_standard=9.0)
    plain = replace(plain, gauges=gauges)
    assert plain.without_batch() == plain
