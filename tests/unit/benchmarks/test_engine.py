"""What the engine's benchmark says of what it saw: a known difference is found, the clock is taken off."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("true", [0.9, 1.0, 1.05])
def test_a_known_difference_is_found_whatever_the_host_does(
    part: Callable[[str], ModuleType], true: float
) -> None:
    """Moods that last over turns, and turns in which the machine all but stands still."""
    module = part("with_and_without")
    dice, mood, cycles = random.Random(3), 1.0, []
    for _ in range(4000):
        mood = 0.9 * mood + 0.1 * dice.uniform(0.5, 1.5)
        turns = []
        for side in module.SIDES:
            stands = 0.2 if dice.random() < 0.05 else 1.0
            rate = 1000.0 * mood * stands * dice.gauss(1.0, 0.1) * (true if side else 1.0)
            turns.append(module.Turn(0.1, round(0.1 * rate)))
        cycles.append(tuple(turns))
    found = module.figures_of(cycles)
    assert found["error"] < 0.01
    assert abs(found["ratio"] - true) < 4 * found["error"]


def test_what_the_clock_takes_for_itself_is_taken_off(part: Callable[[str], ModuleType]) -> None:
    """100 steps of 4 entries and 10 requests: 3 us of ours in each entry, 50 us in each request."""
    module = part("accounted")
    steps = dict.fromkeys((*module.BETWEEN_STEPS, "while_running"), 100)
    calls = dict.fromkeys(module.ENTRIES, 0) | steps | {"request": 10}
    clock_ns = dict.fromkeys(module.ENTRIES, 2000.0) | {"request": 30_000.0}
    ours_ns = dict.fromkeys(module.ENTRIES, 3000) | {"request": 50_000}
    none = module.Snapshot(dict.fromkeys(calls, 0), dict.fromkeys(calls, 0), 1.0, 10.0)
    ns = {entry: round(n * (clock_ns[entry] + ours_ns[entry])) for entry, n in calls.items()}
    found = module.figures_of(none, module.Snapshot(calls, ns, 3.0, 11.0), clock_ns)
    assert (found["between_us"], found["beside_us"], found["request_us"]) == (9.0, 3.0, 50.0)
    assert found["cpu_ratio"] == pytest.approx((100 * 4 * 3e-6 + 10 * 50e-6) / 2.0)
    empty = module.Snapshot(calls, {e: round(n * clock_ns[e]) for e, n in calls.items()}, 3.0, 11.0)
    assert module.per_call_ns(none, empty) == clock_ns | {"publish": 0.0, "tick": 0.0}


@pytest.mark.parametrize(("name", "said"), [("NARROW", 1), ("WIDE", 3)])
def test_the_limit_table_compares_with_the_lowest_limit(
    part: Callable[[str], ModuleType], name: str, said: int
) -> None:
    """Twice the limit gives twice the throughput; every sweep has more clients than places."""
    module = part("limit_table")
    sweep = getattr(module, name)
    keys = ("tokens_per_s", "batch_time_s", "batch_sequences", "queue_wait_s")
    figures = {str(n): dict.fromkeys(keys, 10.0 * n) for n in sweep.sequences}
    text = module.render({"figures": figures}, sweep)
    assert sweep.clients > max(sweep.sequences) == sweep.settings.max_sequences
    top = max(sweep.sequences)
    assert text.splitlines()[-1].endswith(f"Throughput at {top} is {top}.0 times that at 1.")
    assert text.splitlines()[-1].count("Throughput at") == said


def test_a_share_of_the_machine_is_a_quota_with_priority(part: Callable[[str], ModuleType]) -> None:
    """In both versions of cgroups; the client's own group has no quota."""
    module = part("cpu_share")
    assert module.desired_files(1.5, v1=True) == {
        "cpu.shares": "102400",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
    }
    assert module.desired_files(1.5, v1=False)["cpu.max"] == "150000 100000"
    assert list(module.desired_files(None, v1=False)) == ["cpu.weight"]
