"""The arithmetic of the serving benchmarks: what counts, what is compared, what the page keeps."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def part() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a part of benchmarks/serving by its name."""
    directory = str(REPOSITORY / "benchmarks" / "serving")
    sys.path.insert(0, directory)
    yield importlib.import_module
    sys.path.remove(directory)


def test_requests_count_by_when_they_were_due_and_answers_by_when_they_came(
    part: Callable[[str], ModuleType],
) -> None:
    """A backlog of the warm-up counts as throughput, not as latency; a late answer the reverse."""
    module = part("mode_figures")
    answers = [
        module.Answer("realtime", 1.0, 6.0, ""),
        module.Answer("realtime", 5.0, 5.5, ""),
        module.Answer("standard", 6.0, 6.1, "http_429"),
        module.Answer("standard", 7.0, 17.0, "timeout"),
        module.Answer("realtime", 9.0, 12.0, ""),
    ]
    cell = module.cell_of(answers, 5.0, 10.0)
    assert (cell.offered_per_s, cell.answered_per_s) == (0.8, 0.4)
    assert (cell.p50_s, cell.p99_s) == (3.0, 3.0)
    assert (cell.refused_ratio, cell.timed_out_ratio, cell.other_ratio) == (0.25, 0.25, 0.0)
    standard = module.cell_of(answers, 5.0, 10.0, "standard")
    assert (standard.answered_per_s, standard.p50_s) == (0.0, math.inf)
    with pytest.raises(ValueError, match="batch"):
        module.cell_of(answers, 5.0, 10.0, "batch")


def test_ratios_are_taken_within_a_round(part: Callable[[str], ModuleType]) -> None:
    """The machine is twice as slow in the second round: the ratio does not change."""
    module = part("mode_figures")

    def cell(rate: float) -> Any:
        return module.Cell(rate, rate, 1 / rate, 2 / rate, 3 / rate, 0.0, 0.0, 0.0, 0.0)

    rounds = [{"a": cell(10.0), "b": cell(12.0)}, {"a": cell(5.0), "b": cell(6.0)}]
    found = module.ratios_of(rounds, "b", "a", lambda row: row.answered_per_s)
    assert found == [1.2, 1.2]
    assert module.mode_rows("0.5", rounds, "a")[1][-2:] == [
        "1.20 (1.20 to 1.20)",
        "0.83 (0.83 to 0.83)",
    ]


class Engine:
    """A client whose requests are answered when the test says so."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.answers: dict[int, asyncio.Event] = {}
        self.arrived = asyncio.Event()

    async def complete(self, prompt: list[int], tokens: int, **_: Any) -> Outcome:
        """Waits for the test."""
        del prompt
        self.sent.append(tokens)
        self.answers[tokens] = asyncio.Event()
        self.arrived.set()
        await self.answers[tokens].wait()
        return Outcome(True, "", 200, 1, 0.0, None, 0.0, tokens)

    async def until_sent(self, count: int) -> None:
        """Returns when so many were sent."""
        while len(self.sent) < count:
            self.arrived.clear()
            await self.arrived.wait()


async def test_a_static_batch_waits_for_the_whole_one_before(
    part: Callable[[str], ModuleType],
) -> None:
    """The last response of a batch releases all its responses, and only then the next batch."""
    module = part("send_modes")
    engine = Engine()
    arrivals = [Arrival(n, 0.0, "p", "realtime", "s", 1, n) for n in range(5)]
    batches = module.StaticBatches(engine, 3, 0.01, 60.0)
    sending = asyncio.create_task(batches.send(arrivals))
    async with asyncio.timeout(20):
        await engine.until_sent(3)
        engine.answers[0].set()
        engine.answers[1].set()
        await asyncio.sleep(0)
        assert engine.sent == [0, 1, 2]
        engine.answers[2].set()
        await engine.until_sent(5)
        engine.answers[3].set()
        engine.answers[4].set()
        found = await sending
    assert [answer.cause for answer in found] == [""] * 5
    assert len({answer.ended_s for answer in found[:3]}) == 1
    assert found[3].ended_s > found[0].ended_s


async def test_a_client_that_hung_up_before_its_batch_is_not_sent(
    part: Callable[[str], ModuleType],
) -> None:
    """Its request counts as a timeout, and the engine never sees it."""
    module = part("send_modes")
    engine = Engine()
    arrivals = [Arrival(n, -9.0 if n else 0.0, "p", "realtime", "s", 1, n) for n in range(2)]
    sending = asyncio.create_task(module.StaticBatches(engine, 2, 0.01, 5.0).send(arrivals))
    async with asyncio.timeout(20):
        await engine.until_sent(1)
        engine.answers[0].set()
        found = await sending
    assert engine.sent == [0]
    assert [answer.cause for answer in found] == ["", "timeout"]


class Server:
    """A client of a server that answers each request after 50 ms, however many there are."""

    async def complete(self, prompt: list[int], tokens: int, **_: Any) -> Outcome:
        """Takes its time."""
        del prompt
        await asyncio.sleep(0.05)
        return Outcome(True, "", 200, 1, 0.0, None, 0.0, tokens)


async def test_the_capacity_does_not_count_the_ramp(part: Callable[[str], ModuleType]) -> None:
    """Ten clients, one of whose requests takes 50 ms: at most 200 a second, and none is left out."""
    module = part("send_modes")
    arrivals = [Arrival(n, 0.0, "p", "realtime", "s", 1, 1) for n in range(2000)]
    found = await module.saturated_per_s(Server(), arrivals, 10, ramp_s=0.2, seconds=0.5)
    assert 0 < found <= 220
    with pytest.raises(RuntimeError, match="do not last"):
        await module.saturated_per_s(Server(), arrivals[:20], 10, ramp_s=0.2, seconds=0.5)


def test_stock_vllm_starts_with_all_options_but_ours(part: Callable[[str], ModuleType]) -> None:
    """The same command without our scheduler and middleware, on another port."""
    module = part("stock_and_ours")
    ours = ["python", "-m", "api", "--port=1", "--scheduler-cls=a", "--middleware=b", "--dtype=x"]
    assert module.stock_argv(ours, 2)[1:] == ["-m", "api", "--port=2", "--dtype=x"]


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


def test_the_page_keeps_the_sections_of_others(part: Callable[[str], ModuleType]) -> None:
    """A section is replaced in its place; a new one comes last."""
    module = part("results_page")
    page = module.with_section(module.with_section("", "One", "1"), "Two", "2")
    again = module.with_section(page, "One", "    new\n\n### Part\n\nx\n")
    assert again == "# Serving, measured\n\n## One\n\n    new\n\n### Part\n\nx\n\n## Two\n\n2\n"


def test_the_ratio_of_sequential_to_concurrent_requests(part: Callable[[str], ModuleType]) -> None:
    """Medians of the passes of each way."""
    module = part("serial_against_async")
    runs = [module.Run("sequential", seconds, 64, 0, 0) for seconds in (10.0, 30.0, 20.0)]
    runs += [module.Run("concurrent", seconds, 64, 0, 0) for seconds in (1.0, 5.0, 2.0)]
    _, text, ratio = module.report(runs, argparse.Namespace(prompts=2, max_tokens=32))
    assert ratio == 10.0
    assert "10.0 times as fast" in text


WATCH_S = 1_767_225_600.0
"""2026-01-01T00:00:00Z."""


def _sample(cause: str, latency_s: float) -> Any:
    outcome = Outcome(not cause, cause, 0, 1, 0.0, None, latency_s, 8)
    return Sample(Arrival(0, 0.0, "p", "batch", "s", 8, 8), outcome, 0.0, 0.0, latency_s)


def test_a_run_of_a_scaler_counts_from_the_step(part: Callable[[str], ModuleType]) -> None:
    """The second pod at 20 s, ready at 60 s; the wait is too long from 10 s to 70 s."""
    module = part("hpa_figures")
    watches = [
        module.Watch(WATCH_S + at_s, 1 + (at_s >= 20), 1 + (at_s >= 60)) for at_s in range(-30, 120)
    ]
    waits = tuple((WATCH_S + at_s, 2.0 if 10 <= at_s < 70 else 0.1) for at_s in range(-30, 120, 2))
    samples = [_sample(cause, 1.0) for cause in ("", "", "http_429", "truncated", "timeout")]
    found = module.outcome_of(
        watches, waits, samples, objective_s=0.5, step_s=WATCH_S, end_s=WATCH_S + 120
    )
    assert (found.order_s, found.ready_s) == (20.0, 60.0)
    assert (found.broken_s, found.restored_s, found.missed_s) == (10.0, 70.0, 60.0)
    assert found.pod_seconds == 20 + 2 * 100
    assert (found.requests, found.failed, found.refused, found.p95_s) == (5, 2, 1, 1.0)


def test_a_wait_that_comes_back_at_the_end_was_not_restored(
    part: Callable[[str], ModuleType],
) -> None:
    """Within the objective for a moment is not within it again."""
    module = part("hpa_figures")
    waits = tuple((float(at_s), 0.1 if at_s in {20, 58, 60} else 2.0) for at_s in range(0, 62, 2))
    assert module.restored_at(waits, 0.5, 0.0) == (0.0, None)
    never = module.Outcome(None, None, 0.0, None, 60.0, 60.0, 9, 0, 0, None)
    row = module.outcome_table({"KEDA": [never]}).splitlines()[-1]
    assert row.startswith("| KEDA | 1 | never | never | 0 s | never | 60 s |")


def test_keda_scales_the_service_and_not_its_deployment(
    part: Callable[[str], ModuleType],
) -> None:
    """The target per replica is the threshold, and no data is not no load."""
    module = part("keda_cluster")
    spec = module.desired_scaled_object(
        "chat", "team", prometheus_url="http://p", query="sum(x)", target=8.0, most=2
    )["spec"]
    assert spec["scaleTargetRef"]["kind"] == "InferenceService"
    assert spec["triggers"][0]["metadata"] == {
        "serverAddress": "http://p",
        "query": "sum(x)",
        "threshold": "8",
        "ignoreNullValues": "false",
    }
