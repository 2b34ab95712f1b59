"""The control loop on a real cluster: threefold load, no Prometheus, then the load removed.

    python benchmarks/control/load.py --out benchmarks/control/LOAD.md --figure docs/img/control.png

It needs root, and no other node on the machine. Everything is real: the local node, the chart, vLLM
pods with CPU limits (so that replicas add capacity), the router, and a Prometheus that is stopped.
The load follows the measured capacity of one replica. The table shows goals, measurements and
misses.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetkeeper.commands.fleet.prometheus_history import PrometheusHistory
from fleetkeeper_local.common.paths import data_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.demo.figure import FAULT, LOAD, Run, Span, draw
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.installation import NAMESPACE, apply_example, ensure_namespace
from fleetkeeper_local.demo.play import PATIENCE
from fleetkeeper_local.demo.record import failed, seconds_of
from fleetkeeper_local.demo.recorder import Points, Recorder
from fleetkeeper_local.demo.stage import LocalStage
from fleetkeeper_local.demo.traffic import Traffic, joined, measure_capacity
from fleetkeeper_local.load.schedule import Phase, Shape, plan_arrivals
from fleetkeeper_local.node.flags import read_settings
from fleetkeeper_local.node.node import Node

TENANT = "fleetkeeper-load"
TITLE = "The control loop: threefold load, five minutes without Prometheus, load removed"
SHARE_RATIO = 0.45
"""Share of one replica's capacity: one replica carries this load, but not three times as much."""
YOUNG_S, GONE_S, AFTER_S, CALM_S = 45.0, 300.0, 30.0, 10.0
SURGE_MAX_S = 200.0
POLL_S = 1.0
SEED = 7
STEP_S = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: the goal, the measurement, and whether the goal was met."""

    what: str
    asked: str
    measured: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a run's stages, in seconds of the wall clock."""

    surge_s: float
    gone_s: float
    back_s: float
    away_s: float
    end_s: float


class Course:
    """One run of the benchmark."""

    def __init__(
        self, stage: LocalStage, fleet: Fleet, address: str, capacity: float, end_s: float
    ) -> None:
        self.stage, self.fleet, self.address, self.capacity = stage, fleet, address, capacity
        self.end_s = end_s
        self.traffics: list[Traffic] = []
        self.spans: list[Span] = []

    def run(self) -> Times:
        """Run all stages; wait for the last response."""
        x1 = SHARE_RATIO * self.capacity
        try:
            self._begin("x1", x1)
            self._until(lambda: False, YOUNG_S)
            surge_s = self._begin("x3", 3 * x1)
            self._until(self._two_for_a_while(), SURGE_MAX_S)
            self.stage.stop_prometheus()
            gone_s = time.time()
            say(f"Prometheus stopped for {GONE_S:.0f} s")
            self._until(lambda: False, GONE_S)
            self.stage.start_prometheus()
            back_s = time.time()
            self.spans.append(Span(gone_s, back_s, FAULT, "Prometheus stopped"))
            self._until(lambda: False, AFTER_S)
            away_s = self._begin("x1 again", x1)
            self._until(lambda: len(self.fleet.pods("engine")) == 1, self.end_s - time.monotonic())
            self._until(lambda: False, CALM_S)
        finally:
            self.stage.start_prometheus()
            for traffic in self.traffics:
                traffic.end()
        self._close(time.time())
        for traffic in self.traffics:
            traffic.wait()
        return Times(surge_s, gone_s, back_s, away_s, time.time())

    def _begin(self, name: str, rate: float) -> float:
        now_s = time.time()
        if self.traffics:
            self.traffics[-1].end()
            self._close(now_s)
        arrivals = plan_arrivals([Phase(name, 1200.0, rate)], Shape(), SEED + len(self.traffics))
        self.traffics.append(Traffic(self.address, self.fleet.name, arrivals, PATIENCE).start())
        self._stage = (now_s, f"{name}: {rate:.1f}/s")
        say(f"load {name}: {rate:.1f} requests/s")
        return now_s

    def _close(self, now_s: float) -> None:
        begin_s, text = self._stage
        self.spans.append(Span(begin_s, now_s, LOAD, text))

    def _until(self, event: Callable[[], bool], max_s: float) -> None:
        begin_s, said_s = time.monotonic(), 0.0
        while (elapsed_s := time.monotonic() - begin_s) < max_s and not event():
            if elapsed_s - said_s >= 10:
                said_s = elapsed_s
                say(self.fleet.summary())
            time.sleep(POLL_S)

    def _two_for_a_while(self) -> Callable[[], bool]:
        since: list[float] = []

        def event() -> bool:
            if sum(pod.ready for pod in self.fleet.engines()) < 2:
                since.clear()
                return False
            since.append(time.monotonic())
            return since[-1] - since[0] >= AFTER_S

        return event


# -- results -----------------------------------------------------------------------------------


def read_wait(url: str, query: str, begin_s: float, end_s: float) -> Points:
    """Return the values of a range query with one series from Prometheus, by the wall clock."""
    rows = PrometheusHistory(url, deadline_s=30.0).range(query, begin_s, end_s, STEP_S)
    values = rows[0]["values"] if rows else []
    return tuple((float(at), float(text)) for at, text in values if text != "NaN")


def first_s(points: Iterable[tuple[float, float]], wanted: Callable[[float], bool]) -> float | None:
    """Return the time of the first point whose value is `wanted`."""
    return next((at_s for at_s, value in points if wanted(value)), None)


def judged(run: Run, times: Times, waits: Points, oldest: Points) -> list[Row]:
    """Return the table. `waits`: mean queue wait at the engines; `oldest`: age of the oldest."""
    changes = [(seconds_of(str(row["time"])), row) for row in run.decisions]
    replicas = [(at_s, row) for at_s, row in changes if row["what"] == "replicas"]
    objective = next(iter(value for _, value in run.points("objective_queue_wait_seconds")))
    passed = [
        first_s(((t, v) for t, v in points if t >= times.surge_s), lambda v: v > objective)
        for points in (waits, oldest)
    ]
    broken_s = min((at_s for at_s in passed if at_s is not None), default=times.surge_s)
    first = min((at_s for at_s, _ in changes if at_s >= times.surge_s), default=None)
    ups = [at_s for at_s, row in replicas if at_s >= times.surge_s and _grows(row)]
    ready_s = next(
        (k.at_s for k in run.observations if k.at_s >= times.surge_s and k.ready >= 2), None
    )
    well_s = _settled(waits, objective, ready_s)
    downs = [at_s for at_s, row in replicas if not _grows(row)]
    shown_s = _breaker(run, times.gone_s, 1.0)
    closed_s = _breaker(run, times.back_s, 0.0)
    dark = [seen for seen in run.observations if times.gone_s <= seen.at_s <= times.back_s]
    known = sum(bool(seen.gauges.get(("signal_coverage_ratio", ()))) for seen in dark)
    bad, refused = failed(run.samples), sum(s.outcome.status == 429 for s in run.samples)
    last = run.observations[-1]
    down_s = min((at_s for at_s in downs if at_s >= times.away_s), default=None)
    return [
        _within("first action, after queue wait exceeded its objective", 15, broken_s, first),
        _within("scale-up, after the same moment", 20, broken_s, min(ups, default=None)),
        _within("queue wait back within its objective, after the new pod was ready", 30, ready_s, well_s),
        _count(f"replicas removed while Prometheus was down ({(times.back_s - times.gone_s) / 60:.1f} min, under load)", 0, sum(times.gone_s <= at_s <= times.back_s for at_s in downs)),
        _within("the breaker reports that Prometheus is down", 30, times.gone_s, shown_s),
        Row("samples in that time with known signals of replicas", "most", f"{known} of {len(dark)}", known > 0.8 * len(dark)),
        _within("the breaker reports that Prometheus is back", 30, times.back_s, closed_s),
        Row("load removed: first replica removed after", "60 s (the delay) or more", _seconds(times.away_s, down_s), down_s is not None and down_s - times.away_s >= 60),
        Row("load removed: replicas at the end", "1 (minReplicas)", str(last.ready), last.ready == 1),
        _count("failed requests", 0, len(bad)),
        _count("requests shed after all retries", 0, refused),
    ]  # fmt: skip


def _grows(row: object) -> bool:
    assert isinstance(row, dict)
    return int(row.get("to") or 0) > int(row.get("from") or 0)


def _settled(waits: Points, objective: float, ready_s: float | None) -> float | None:
    """Return the time from which the mean wait stays within the objective for 10 s."""
    if ready_s is None:
        return None
    later = [(at_s, value) for at_s, value in waits if at_s >= ready_s]
    for number, (at_s, _) in enumerate(later):
        held = [value for t, value in later[number:] if t <= at_s + 10]
        if all(value <= objective for value in held):
            return at_s
    return None


def _breaker(run: Run, since_s: float, state: float) -> float | None:
    key = ("breaker_state", (("breaker", "source"),))
    return next(
        (k.at_s for k in run.observations if k.at_s >= since_s and k.gauges.get(key) == state), None
    )


def _seconds(begin_s: float | None, end_s: float | None) -> str:
    return "never" if begin_s is None or end_s is None else f"{max(0.0, end_s - begin_s):.0f} s"


def _within(what: str, max_s: float, begin_s: float | None, end_s: float | None) -> Row:
    kept = begin_s is not None and end_s is not None and end_s - begin_s <= max_s
    return Row(what, f"{max_s:.0f} s", _seconds(begin_s, end_s), kept)


def _count(what: str, most: int, found: int) -> Row:
    return Row(what, str(most), str(found), found <= most)


def written(rows: Sequence[Row], run: Run, capacity: float, figure: Path) -> str:
    """Return the page in Markdown."""
    load = os.getloadavg()
    return "\n".join(
        [
            "# The control loop on a real cluster, measured",
            "",
            "    python benchmarks/control/load.py",
            "",
            f"One machine with {os.cpu_count()} cores: a real Kubernetes, two operators, Prometheus (scrapes every 2 s), the router,",
            "vLLM pods of `examples/tiny.yaml` (600m CPU each) and the load generator, all on it; load average",
            f"{load[0]:.1f} (1 min) at the end. One replica answered {capacity:.1f} requests/s; {len(run.samples)} requests in",
            f"{run.end_s - run.start_s:.0f} s, open loop, tiers mixed (30% realtime, 50% standard, 20% batch). The client honors",
            "Retry-After of 429 responses.",
            "",
            "| | goal | measured | |",
            "| --- | --- | --- | --- |",
            *(f"| {r.what} | {r.asked} | {r.measured} | {'' if r.kept else '**missed**'} |" for r in rows),
            "",
            f"![arrivals, waits, limits, replicas and breakers over time]({os.path.relpath(figure, 'benchmarks/control')})",
            "",
        ]
    )  # fmt: skip


def main() -> None:
    """Run the benchmark, write the results, and remove the node."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/load.md"))
    parser.add_argument("--most-seconds", type=float, default=1200.0, help="for the whole run")
    parser.add_argument("--figure", type=Path, default=Path("out/benchmarks/load.png"))
    args = parser.parse_args()
    args.end_s = time.monotonic() + args.most_seconds
    node = Node(read_settings(data_dir()))
    try:
        rows = measure(LocalStage(node), args)
    finally:
        node.down()
    if not all(row.kept for row in rows):
        sys.exit("some goals were missed")


def measure(stage: LocalStage, args: argparse.Namespace) -> list[Row]:
    """Run the benchmark on a running node; write the table and the figure."""
    stage.install()
    ensure_namespace(stage.cluster, TENANT)
    stage.put_model(TENANT)
    fleet = apply_example(stage.cluster, TENANT)
    fleet.said = say
    fleet.await_ready(1)
    address = fleet.base_url()
    capacity = measure_capacity(address, fleet.name, Shape())
    say(f"one replica answers {capacity:.1f} requests/s")
    course = Course(stage, fleet, address, capacity, args.end_s)
    with Recorder(stage.cluster.kubeconfig, NAMESPACE, TENANT, fleet.name) as recorder:
        times = course.run()
    own = f'inference_service="{fleet.name}",tier=~"realtime|standard"'
    wait = "fleetkeeper_queue_wait_seconds"
    url = stage.node.prometheus_url
    waits, oldest = (
        read_wait(url, query, times.surge_s, times.gone_s)
        for query in (
            f"sum(rate({wait}_sum{{{own}}}[10s])) / sum(rate({wait}_count{{{own}}}[10s]))",
            f"max(fleetkeeper_oldest_wait_seconds{{{own}}})",
        )
    )
    begin_s = course.traffics[0].started_at_s
    run = Run(
        TITLE,
        begin_s,
        times.end_s,
        course.spans,
        recorder.observations,
        recorder.decisions,
        joined(course.traffics),
    )
    draw(run, args.figure)
    rows = judged(run, times, waits, oldest)
    text = written(rows, run, capacity, args.figure)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)
    say(text)
    for sample in failed(run.samples):
        say(f"failed at {sample.sent_s:.1f} s: {sample.arrival.tier} {sample.outcome}")
    return rows


if __name__ == "__main__":
    main()
