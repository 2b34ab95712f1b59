"""Limits in units of processor time: a slow machine and a disturbed try pass, slow code does not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.processor_units import LONGEST, TRIES, Clock, longest_turn, unit_s, units_of


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def slowed(factor: float) -> Clock:
    """Return the clock of a machine that takes so many times longer for everything."""
    return lambda: factor * time.thread_time()


@pytest.mark.parametrize("factor", [0.2, 1.0, 10.0])
def test_the_speed_of_the_machine_changes_no_figure(factor: float) -> None:
    work_s = 20 * unit_s()
    assert 10 < units_of(lambda: busy(work_s), 0.0, slowed(factor)) < 40


def test_one_try_without_a_disturbance_is_enough() -> None:
    tries: Iterator[float] = iter([100.0, 100.0, 5.0])
    assert units_of(lambda: busy(next(tries) * unit_s()), 50) < 50
    assert next(tries, None) is None, "and no try follows it"


async def test_slow_work_is_found_in_every_try() -> None:
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        busy(3 * LONGEST * unit_s())

    assert await longest_turn(call) > LONGEST
    assert calls == TRIES
