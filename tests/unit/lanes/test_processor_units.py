"""Limits in units of processor time: a slow machine and a disturbed try pass, slow code does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processor_units import LONGEST, TRIES, longest_turn, units_of


class Processor:
    """A processor whose clock a test moves: it takes one unit between two readings."""

    def __init__(self, unit_s: float = 0.0005) -> None:
        self.unit_s = unit_s
        self.now_s = 0.0

    def clock(self) -> float:
        self.now_s += self.unit_s
        return self.now_s

    def work(self, units: float) -> None:
        self.now_s += units * self.unit_s


@pytest.mark.parametrize("unit_s", [0.0001, 0.0005, 0.005])
def test_the_speed_of_the_machine_changes_no_figure(unit_s: float) -> None:
    processor = Processor(unit_s)
    found = units_of(lambda: processor.work(19), 0.0, processor.clock)
    assert found == pytest.approx(20)


def test_a_machine_that_becomes_slow_during_the_work_changes_no_figure() -> None:
    """The unit after the work is then the longer one, and it divides."""
    processor = Processor()

    def work() -> None:
        processor.unit_s *= 4
        processor.work(19)

    assert units_of(work, 50, processor.clock) == pytest.approx(20)


def test_one_try_without_a_disturbance_is_enough() -> None:
    processor = Processor()
    tries: Iterator[float] = iter([100.0, 100.0, 5.0])
    assert units_of(lambda: processor.work(next(tries)), 50, processor.clock) < 50
    assert next(tries, None) is None, "and no try follows it"


async def test_slow_work_is_found_in_every_try() -> None:
    processor = Processor()
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        processor.work(LONGEST)

    assert await longest_turn(call, clock=processor.clock) > LONGEST
    assert calls == TRIES
