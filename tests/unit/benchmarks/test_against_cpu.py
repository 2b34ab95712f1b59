"""The arithmetic of the comparison with vLLM on CPU: figures of a load, replays, errors and goals."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_contract.step_terms import TERMS, StepClass
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals
from fleetkeeper_steps.hardware import Hardware

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def part() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a part of benchmarks/simulate by its name."""
    directories = [str(REPOSITORY / "benchmarks" / name) for name in ("simulate", "serving")]
    sys.path[:0] = directories
    yield importlib.import_module
    for directory in directories:
        sys.path.remove(directory)


def hardware(**changes: float) -> Hardware:
    """Return hardware without overheads; a step takes 10 ms unless changed."""
    found = Hardware(
        name="test",
        model="unknown",
        system="unknown",
        gpus=1,
        precision="unknown",
        t0_s=0.01,
        w_s=0.0,
        g_s=0.0,
        b_s=0.0,
        c_s=0.0,
        q_s=0.0,
        kv_capacity_tokens=16_000.0,
        step_overhead_s=0.0,
        sequence_overhead_s=0.0,
        request_overhead_s=0.0,
        kernel_ratio=1.0,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def arrival(number: int, at_s: float, prompt: int, output: int) -> Arrival:
    return Arrival(number, at_s, "load", "standard", "", prompt, output)


def test_an_open_loop_is_played_at_its_times(part: Callable[[str], ModuleType]) -> None:
    """One sequence at a time: the second request waits for the first; the third finds nobody."""
    module = part("replayed_load")
    load = [arrival(0, 1.0, 20, 11), arrival(1, 1.005, 20, 11), arrival(2, 2.0, 20, 11)]
    found = module.Simulated(hardware(), module.Limits(1, 512)).open_loop(load)
    assert found.queue_wait_s == pytest.approx(0.105 / 3)
    assert found.ttft_s == pytest.approx(0.105 / 3 + 0.01)
    assert found.tpot_s == found.itl_s == pytest.approx(0.01)
    assert (found.batch_time_s, found.sequences) == (pytest.approx(0.01), 1.0)
    assert found.requests_per_s == pytest.approx(3 / 2.11)
    assert found.tokens_per_s == pytest.approx(33 / 2.11)
    assert found.busy_ratio == pytest.approx(0.33 / 2.11)


def test_a_closed_loop_keeps_the_engine_full(part: Callable[[str], ModuleType]) -> None:
    """Of four clients two run, for 20 steps of 10 ms, and two wait as long."""
    module = part("replayed_load")
    load = [arrival(number, 0.0, 20, 20) for number in range(100)]
    found = module.Simulated(hardware(), module.Limits(2, 512)).closed_loop(load, 4, (0.995, 4.995))
    assert found.requests_per_s == pytest.approx(10.0)
    assert found.queue_wait_s == pytest.approx(0.2)
    assert (found.sequences, found.busy_ratio) == (pytest.approx(2.0), pytest.approx(1.0))
    with pytest.raises(ValueError, match="100 requests do not last"):
        module.Simulated(hardware(), module.Limits(2, 512)).closed_loop(load, 4, (1.0, 60.0))


def test_requests_outside_the_span_do_not_count(part: Callable[[str], ModuleType]) -> None:
    module = part("replayed_load")
    spec = EngineSpec(hardware().costs)
    before = module.reading_of(Engine(spec, "test", started=0.0))
    after = replace(before, at_s=10.0, requests=4.0, wait_s=2.0, steps=100.0, steps_s=8.0)
    ended = [
        module.Ended(0.0, 0.5, 0.9, 5),
        module.Ended(1.0, 1.5, 2.5, 11),
        module.Ended(8.0, 9.5, 11.5, 5),
    ]
    found = module.figures_of(before, after, ended, (1.0, 11.0))
    assert (found.requests_per_s, found.tokens_per_s) == (0.1, 1.1)
    assert (found.queue_wait_s, found.ttft_s, found.tpot_s) == (0.5, 0.5, 0.1)
    assert (found.batch_time_s, found.busy_ratio) == (0.08, 0.8)
    with pytest.raises(ValueError, match="between 20"):
        module.figures_of(before, after, ended, (20.0, 30.0))


def test_sums_are_those_of_their_class(part: Callable[[str], ModuleType]) -> None:
    module = part("replayed_load")
    block = tuple(float(value) for value in range(2 * len(TERMS)))
    assert module.sums_of(block, StepClass.DECODE).steps == 0.0
    assert module.sums_of(block, StepClass.PREFILL).steps == len(TERMS)
    assert module.sums_of(block, StepClass.PREFILL).seconds_seconds == 2 * len(TERMS) - 1


def test_a_fit_of_one_load_predicts_another(part: Callable[[str], ModuleType]) -> None:
    """The simulated engine is measured as the real one is. Its fit gives back its own figures."""
    module = part("replayed_load")
    real = hardware(t0_s=0.01, g_s=3e-4, b_s=1e-3, c_s=1e-6)
    limits = module.Limits(8, 2048)
    shape = Shape(tiers={"standard": 1.0}, prompt_tokens=(30, 400), output_tokens=(20, 120))
    low, high = (plan_arrivals([Phase("", 200.0, rate)], shape, 5) for rate in (2.0, 3.0))
    spec = EngineSpec(real.costs, kv_capacity_tokens=16_000.0, max_sequences=8, max_tokens=2048)
    engine = Engine(spec, "test", started=0.0)
    readings = [module.reading_of(engine)]
    for row in low:
        engine.advance(row.at_s)
        engine.arrive(Request(row.at_s, 1, row.prompt_tokens, row.output_tokens))
        if row.at_s >= readings[-1].at_s + 10.0:
            readings.append(module.reading_of(engine))
    fit = module.fitted(readings, 16_000.0)
    predicted, expected = (module.Simulated(h, limits).open_loop(high) for h in (fit, real))
    assert predicted.queue_wait_s == pytest.approx(expected.queue_wait_s, rel=0.05)
    assert predicted.batch_time_s == pytest.approx(expected.batch_time_s, rel=0.01)
    assert predicted.ttft_s == pytest.approx(expected.ttft_s, rel=0.02)


def test_a_slower_machine_shows_in_the_speed_of_a_window(
    part: Callable[[str], ModuleType],
) -> None:
    """The second window has the same steps as the first and takes a quarter longer."""
    module = part("replayed_load")
    real = hardware(t0_s=0.005, w_s=0.01, g_s=3e-4, b_s=1e-4, c_s=1e-6)
    engine = Engine(EngineSpec(real.costs, max_sequences=8), "test", started=0.0)
    readings = [module.reading_of(engine)]
    for slowness in (1.0, 1.25):
        engine.slowness = slowness
        engine.arrive(Request(engine.time, 1, 300, 400))
        while not engine.is_idle:
            engine.advance(engine.time + 1.0)
        readings.append(module.reading_of(engine))
    first, second = module.speeds(readings, real)
    assert first == pytest.approx(1.0, rel=0.01)
    assert second / first == pytest.approx(1.25)


def pair(module: ModuleType, figures: Any, simulated: Any) -> Any:
    return module.Pair(figures, simulated, 0.1, 0.02)


def figures(module: ModuleType, **changes: float) -> Any:
    base = module.Figures(2.0, 100.0, 0.4, 0.5, 0.02, 0.02, 0.02, 3.0, 0.8)
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("measured_s", "simulated_s", "met"),
    [
        (0.4, 0.49, True),  # 22%, 90 ms
        (0.4, 0.52, False),  # 30%, 120 ms
        (0.4, 0.28, False),  # -30%, -120 ms
        (0.01, 0.05, True),  # 400%, 40 ms
        (0.0, 0.04, True),
        (0.0, 0.06, False),
    ],
)
def test_a_queue_wait_is_close_by_ratio_or_by_difference(
    part: Callable[[str], ModuleType], measured_s: float, simulated_s: float, *, met: bool
) -> None:
    load, table = part("replayed_load"), part("errors_table")
    measured, simulated = (figures(load, queue_wait_s=v) for v in (measured_s, simulated_s))
    assert table.wait_met([pair(table, measured, simulated)]) is met


def test_throughput_has_to_be_close_in_requests_and_in_tokens(
    part: Callable[[str], ModuleType],
) -> None:
    load, table = part("replayed_load"), part("errors_table")
    same = figures(load)
    for changes, met in (
        ({"requests_per_s": 2.2}, True),
        ({"requests_per_s": 2.4}, False),
        ({"tokens_per_s": 80.0}, False),
    ):
        assert table.throughput_met([pair(table, same, figures(load, **changes))]) is met


def test_the_tables_have_medians_ranges_and_verdicts(part: Callable[[str], ModuleType]) -> None:
    load, table = part("replayed_load"), part("errors_table")
    rounds = [
        pair(table, figures(load), figures(load, queue_wait_s=wait)) for wait in (0.4, 0.6, 0.8)
    ]
    lines = table.errors_table({"lower": rounds, "full": rounds[:1]}).splitlines()
    assert lines[0] == "| measured, simulated: error | lower | full |"
    assert lines[4] == "| queue wait, ms | 400, 600: +50% (+0% to +100%) | 400, 400: +0% |"
    goals = table.goals_table({"lower": rounds}).splitlines()
    assert goals[-1] == "| lower | +0.0% | +0.0% | met | +50% | +200 ms | **missed** |"
