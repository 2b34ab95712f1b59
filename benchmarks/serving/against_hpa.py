"""A threefold step of load: replicas set by Fleetkeeper, and by KEDA with the HorizontalPodAutoscaler.

    .venv/bin/python benchmarks/serving/against_hpa.py

It needs root, and no other node on the machine. Everything is real: the local node, the chart, vLLM
pods with CPU limits, the router, Prometheus (scrapes every 2 s), KEDA's operator and metrics server
(built from its Go module the first time), and the HPA controller with its defaults. All runs have
the same engines, with live limits and tiers by Fleetkeeper; only who sets the replicas differs
(`spec.scaling.mode`). Each run creates its own service. The section in RESULTS.md is replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "control")]

from hpa_figures import Outcome, Watch, outcome_of, outcome_table  # noqa: E402
from keda_cluster import Keda, desired_scaled_object  # noqa: E402
from load import read_wait  # noqa: E402
from results_page import measured_on, write_section  # noqa: E402

from fleetkeeper_local.common.paths import data_dir  # noqa: E402
from fleetkeeper_local.common.report import say  # noqa: E402
from fleetkeeper_local.demo.fleet import ENGINE, Fleet  # noqa: E402
from fleetkeeper_local.demo.installation import ensure_namespace  # noqa: E402
from fleetkeeper_local.demo.stage import LocalStage  # noqa: E402
from fleetkeeper_local.demo.traffic import Traffic, measure_capacity  # noqa: E402
from fleetkeeper_local.load.client import Patience  # noqa: E402
from fleetkeeper_local.load.schedule import Phase, Shape, plan_arrivals  # noqa: E402
from fleetkeeper_local.node.flags import read_settings  # noqa: E402
from fleetkeeper_local.node.node import Node  # noqa: E402
from tests.support.node.service_world import tiny  # noqa: E402

TITLE = "# Serving, measured\n"
HEADING = "A threefold step of load: Fleetkeeper, and KEDA with the HPA"
TENANT = "fleetkeeper-hpa"
SHARE_RATIO = 0.45
"""First load relative to one replica's capacity: one replica carries it, but not three times as much."""
BEFORE_S = 75.0
"""Longer than the first minute of a pod, which the control loop does not judge."""
SHAPE = Shape()
ONE_TRY = Patience(attempts=1, request_timeout_s=120.0)
"""A client that hides nothing: each refusal and each break counts."""
POLL_S = 0.5
MAX_REPLICAS = 2
"""What two cores can run."""
WAIT = "fleetkeeper_queue_wait_seconds"


READING = (
    "Fleetkeeper orders when queue wait misses its objective. KEDA on running requests orders when its target is exceeded, so "
    "it pays for a replica before anything waits; on waiting requests it orders when a queue exists at one of its polls. The "
    "speed of the machine differs between runs, which follow one another: the same load makes requests wait in one run and not "
    "in the next. Compare the times within a row first."
)


@dataclass(frozen=True, slots=True)
class Scaler:
    """Who sets the replicas: Fleetkeeper (no metric), or KEDA with a target of a metric per replica."""

    name: str
    metric: str = ""
    target: float = 0.0

    @property
    def title(self) -> str:
        """The row's name in the table."""
        if not self.metric:
            return "Fleetkeeper"
        what = self.metric.removeprefix("fleetkeeper_")
        return f"KEDA, {self.target:g} {what} requests per replica"


SCALERS = (
    Scaler("ours"),
    Scaler("keda-waiting-1", "fleetkeeper_waiting", 1),
    Scaler("keda-waiting-8", "fleetkeeper_waiting", 8),
    Scaler("keda-running-12", "fleetkeeper_running", 12),
)


class Watcher:
    """A thread that records the engine pods of a fleet while its block runs."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._failure: Exception | None = None
        self.watches: list[Watch] = []

    def __enter__(self) -> Self:
        """Start recording."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop recording; raise what ended it."""
        self._over.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(POLL_S):
                pods = self._fleet.pods(ENGINE)
                ready = sum(pod.ready and not pod.leaving for pod in pods)
                self.watches.append(Watch(time.time(), len(pods), ready))
        except Exception as error:  # noqa: BLE001 - raised again when the block is left
            self._failure = error


def desired_service(scaler: Scaler, name: str) -> dict[str, Any]:
    """Return examples/tiny.yaml, scaled by this scaler."""
    manifest = tiny(scaling={"minReplicas": 1, "maxReplicas": MAX_REPLICAS})
    manifest["metadata"]["name"] = name
    if scaler.metric:
        manifest["spec"]["scaling"]["mode"] = "External"
        manifest["spec"]["replicas"] = 1
    return manifest


class Course:
    """All runs on one node."""

    def __init__(self, stage: LocalStage, args: argparse.Namespace) -> None:
        self._stage = stage
        self._step_s: float = args.step_seconds
        self._capacity = 0.0

    def run(self, scaler: Scaler, number: int) -> Outcome:
        """Create a service, apply the load, and return the figures; the service is removed again."""
        name = f"{scaler.name}-{number}"
        fleet = Fleet(self._stage.cluster, TENANT, name)
        fleet.said = say
        say(f"{scaler.title}: run {number}")
        fleet.kubectl("apply", "-f", "-", given=json.dumps(desired_service(scaler, name)))
        try:
            fleet.await_ready(1)
            if not self._capacity:
                self._capacity = measure_capacity(fleet.base_url(), name, SHAPE)
                say(f"one replica answers {self._capacity:.1f} requests/s")
            if scaler.metric:
                self._attach(scaler, fleet)
            found = self._under_load(fleet, number)
        finally:
            fleet.kubectl("delete", "scaledobject", name, "--ignore-not-found")
            fleet.kubectl("delete", "inferenceservices.fleetkeeper.io", name, "--wait=true")
            fleet.until(lambda: not fleet.pods(ENGINE), "all pods are gone")
        say(f"{scaler.title}: {found}")
        return found

    @property
    def capacity(self) -> float:
        """Requests per second of one replica, measured before the first run."""
        return self._capacity

    def _attach(self, scaler: Scaler, fleet: Fleet) -> None:
        """Create the ScaledObject and wait until its HPA reads the metric."""
        own = f'inference_service="{fleet.name}"'
        scaled = desired_scaled_object(
            fleet.name,
            TENANT,
            prometheus_url=self._stage.node.prometheus_url,
            query=f"sum({scaler.metric}{{{own}}})",
            target=scaler.target,
            most=MAX_REPLICAS,
        )
        fleet.kubectl("apply", "-f", "-", given=json.dumps(scaled))
        fleet.until(lambda: self._hpa_is_active(fleet), "the HPA reads its metric")

    @staticmethod
    def _hpa_is_active(fleet: Fleet) -> bool:
        text = fleet.kubectl("get", "horizontalpodautoscalers", "-o", "json")
        return any(
            condition["type"] == "ScalingActive" and condition["status"] == "True"
            for item in json.loads(text)["items"]
            if item["spec"]["scaleTargetRef"]["name"] == fleet.name
            for condition in item["status"].get("conditions", ())
        )

    def _under_load(self, fleet: Fleet, number: int) -> Outcome:
        x1 = SHARE_RATIO * self._capacity
        with Watcher(fleet) as watcher:
            before = self._traffic(fleet, BEFORE_S, x1, 10 * number)
            before.wait()
            begin_s = time.time()
            step = self._traffic(fleet, self._step_s, 3 * x1, 10 * number + 1)
            step.wait()
        end_s = begin_s + self._step_s
        return outcome_of(
            watcher.watches,
            self._waits(fleet, begin_s, end_s),
            step.samples,
            objective_s=fleet.live()["spec"]["objectives"]["queueWaitMilliseconds"] / 1e3,
            step_s=begin_s,
            end_s=end_s,
        )

    @staticmethod
    def _traffic(fleet: Fleet, seconds: float, rate: float, seed: int) -> Traffic:
        say(f"{rate:.1f} requests/s for {seconds:.0f} s; {fleet.summary()}")
        arrivals = plan_arrivals([Phase("step", seconds, rate)], SHAPE, seed)
        return Traffic(fleet.base_url(), fleet.name, arrivals, ONE_TRY).start()

    def _waits(self, fleet: Fleet, begin_s: float, end_s: float) -> tuple[tuple[float, float], ...]:
        own = f'inference_service="{fleet.name}",tier=~"realtime|standard"'
        query = f"sum(rate({WAIT}_sum{{{own}}}[10s])) / sum(rate({WAIT}_count{{{own}}}[10s]))"
        return read_wait(self._stage.node.prometheus_url, query, begin_s, end_s)


def render(runs: dict[str, list[Outcome]], capacity: float, step_s: float) -> str:
    """Return the section of RESULTS.md."""
    setting = (
        "One machine: Kubernetes, two operators, KEDA 2.21 with its metrics server, the HPA controller (its default "
        "period of 15 s), Prometheus, the router, vLLM pods of `examples/tiny.yaml` (600m CPU each, at most "
        f"{MAX_REPLICAS}) and the load generator. KEDA scales the InferenceService (`scaling.mode: External`) on a Prometheus query, "
        "polled every 5 s; in all runs Fleetkeeper sets the batch limits and the tiers. One replica answered "
        f"{capacity:.1f} requests/s; the load is {SHARE_RATIO} of that for {BEFORE_S:.0f} s, then three times as much for {step_s:.0f} s (30% "
        "realtime, 50% standard, 20% batch; no retries). Times count from the step. *First order*: a second engine pod exists."
    )
    return "\n\n".join(
        [
            "    .venv/bin/python benchmarks/serving/against_hpa.py",
            setting,
            outcome_table(runs),
            READING,
            measured_on(),
        ]
    )


def main() -> None:
    """Run the benchmark, write the section, and remove the node."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1, help="of each scaler, in turn")
    parser.add_argument("--step-seconds", type=float, default=200.0)
    parser.add_argument("--json", type=Path, default=Path("out/benchmarks/against_hpa.json"))
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    parser.add_argument("--keep", action="store_true", help="leave the node running")
    args = parser.parse_args()
    node = Node(read_settings(data_dir()))
    try:
        measure(LocalStage(node), args)
    finally:
        if not args.keep:
            node.down()


def measure(stage: LocalStage, args: argparse.Namespace) -> None:
    """Run all scalers in turn; write what was measured after each run."""
    stage.install()
    ensure_namespace(stage.cluster, TENANT)
    stage.put_model(TENANT)
    course = Course(stage, args)
    runs: dict[str, list[Outcome]] = {}
    with Keda(stage.node) as keda:
        try:
            for number in range(args.runs):
                for scaler in SCALERS:
                    runs.setdefault(scaler.title, []).append(course.run(scaler, number))
                    keep(runs, course, args)
        except Exception:
            say(keda.logs())
            raise


def keep(runs: dict[str, list[Outcome]], course: Course, args: argparse.Namespace) -> None:
    """Write the runs so far: an interrupted benchmark keeps them."""
    rows = {name: [asdict(run) for run in found] for name, found in runs.items()}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    text = render(runs, course.capacity, args.step_seconds)
    if args.write:
        write_section(HEADING, text, HERE / "RESULTS.md", TITLE)
    say(text)


if __name__ == "__main__":
    main()
