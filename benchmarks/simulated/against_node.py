"""Play one trace on the local node with simulated engines at speed 1, and in `fleetkeeper simulate`.

    .venv/bin/python benchmarks/simulated/against_node.py

It needs root, and no other node on the machine. The operator, Prometheus, the router and the engine pods
are real; only vLLM is simulated. Afterwards the simulator plays the file of the same requests, with the
measured start of a pod. A run whose steps ended late, or that took half of the machine's processor, is
void. `--measured FILE` compares the measurements of an earlier run again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from both_sides import (  # noqa: E402 - the paths are set above
    SERVICE,
    Side,
    attained,
    attainment_rows,
    edge_of,
    is_good,
    phases_of,
    planned,
    replica_rows,
    simulated,
    trace_text,
    voids,
)
from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper.autoscale.signals.histogram_edges import snap_down  # noqa: E402
from fleetkeeper_contract.histogram_buckets import (  # noqa: E402
    BATCH_TIME_EDGES_S,
    QUEUE_WAIT_EDGES_S,
)
from fleetkeeper_contract.tiers import TIER_LABELS  # noqa: E402
from fleetkeeper_local.common.paths import data_dir  # noqa: E402
from fleetkeeper_local.common.report import say  # noqa: E402
from fleetkeeper_local.demo.fleet import ENGINE, Fleet, pod_facts  # noqa: E402
from fleetkeeper_local.demo.installation import (  # noqa: E402
    NAMESPACE,
    apply_example,
    ensure_namespace,
)
from fleetkeeper_local.demo.record import seconds_of  # noqa: E402
from fleetkeeper_local.demo.recorder import Points, Recorder, points_of  # noqa: E402
from fleetkeeper_local.demo.scenario import EngineKind  # noqa: E402
from fleetkeeper_local.demo.stage import LocalStage  # noqa: E402
from fleetkeeper_local.demo.traffic import Traffic  # noqa: E402
from fleetkeeper_local.load.client import Patience  # noqa: E402
from fleetkeeper_local.load.schedule import Arrival  # noqa: E402
from fleetkeeper_local.node.addons import SCRAPE_PERIOD  # noqa: E402
from fleetkeeper_local.node.flags import read_settings  # noqa: E402
from fleetkeeper_local.node.node import Node  # noqa: E402

NAME, TENANT = "both-sides", "fleetkeeper-both-sides"
HEADING = "One trace on a node and in the simulator"
TITLE = "# Simulated engines, measured\n"
WAIT_EDGE_S = snap_down(0.3, QUEUE_WAIT_EDGES_S)
STEP_EDGE_S = snap_down(0.04, BATCH_TIME_EDGES_S)
"""The edges at which the product counts attainment of the objectives in service.yaml."""
HISTOGRAMS = (
    "fleetkeeper_queue_wait_seconds",
    "fleetkeeper_batch_time_seconds",
    "fleetkeeper_simulated_step_lateness_seconds",
)
SCRAPED_S = 6.0
"""Three scrapes: what happened before is in Prometheus."""
ONCE = Patience(attempts=1, request_timeout_s=300.0)
Counts = dict[str, dict[float, float]]
"""Cumulative buckets by the name of a histogram, with its tier if it has some."""


@dataclass(frozen=True)
class Measured:
    """One run on the node."""

    seconds: float
    seed: int
    wanted: Points
    ready: Points
    counts: Counts
    """Counts of all engines of the run."""
    answers: float
    refused: float
    failed: dict[str, int]
    """Failed requests by tier and cause."""
    starts_s: list[float]
    """Start times of pods created in the run."""
    busy_ratio: float
    client_late_s: float
    machine: str


class EnginePods:
    """The engine pods of a run: how many were ready, and how long each start took."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._selector = f"fleetkeeper.io/service={fleet.name},fleetkeeper.io/component={ENGINE}"
        self.ready: list[tuple[float, float]] = []
        self.starts_s: dict[str, float] = {}

    def read(self, start_s: float) -> None:
        """Read them once. `start_s`: of the trace; starts of older pods are left out."""
        count, now = 0, time.time()
        for pod in self._fleet.cluster.pods(self._fleet.namespace, self._selector):
            facts, made_s = pod_facts(pod), seconds_of(pod["metadata"]["creationTimestamp"])
            count += facts.ready and not facts.leaving
            for row in pod["status"].get("conditions") or ():
                if row["type"] == "Ready" and row["status"] == "True" and made_s > start_s:
                    ready_s = seconds_of(row["lastTransitionTime"])
                    self.starts_s.setdefault(facts.uid, ready_s - made_s)
        self.ready.append((now - start_s, float(count)))


def counts_of(url: str, window_s: float) -> Counts:
    """Return the last values of every engine within the window, also of ended ones, added up."""
    found: Counts = {}
    for name in HISTOGRAMS:
        which = f'{name}_bucket{{inference_service="{NAME}",namespace="{TENANT}"}}'
        query = f"sum by (tier, le) (max_over_time({which}[{math.ceil(window_s)}s]))"
        address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            rows = json.load(answer)["data"]["result"]
        for row in rows:
            labels, value = row["metric"], float(row["value"][1])
            key = f"{name} {labels['tier']}" if "tier" in labels else name
            found.setdefault(key, {})[float(labels["le"])] = value
    return found


def measure(
    arrivals: tuple[Arrival, ...],
    seconds: float,
    seed: int,
    *,
    service: Path = SERVICE,
    replicas: int = 2,
    patience: Patience = ONCE,
) -> Measured:
    """Install everything, send the trace once `replicas` are ready, and read what happened."""
    stage = LocalStage(Node(read_settings(data_dir())))
    stage.install(EngineKind.SIMULATED)
    # A service of an earlier run has its own model and replicas.
    stage.cluster.kubectl("delete", "namespace", TENANT, "--ignore-not-found")
    ensure_namespace(stage.cluster, TENANT)
    fleet = apply_example(stage.cluster, TENANT, service, NAME)
    fleet.said = say
    fleet.await_ready(replicas)
    say("waiting until the control loop uses the replicas' metrics")
    fleet.until(lambda: fleet.condition("MetricsAvailable").get("status") == "True", "metrics")
    url = stage.node.prometheus_url
    pods = EnginePods(fleet)
    before, began_s = counts_of(url, SCRAPED_S), time.time()
    with Recorder(stage.cluster.kubeconfig, NAMESPACE, TENANT, NAME) as recorder:
        cpu = psutil.cpu_times()
        with Traffic(fleet.base_url(), NAME, arrivals, patience) as traffic:
            say(f"sending {len(arrivals)} requests in {seconds:.0f} s")
            while not traffic.over:
                pods.read(traffic.started_at_s)
                time.sleep(1.0)
            samples = traffic.wait()
        used = busy_ratio(cpu, psutil.cpu_times())
    time.sleep(SCRAPED_S)
    after = counts_of(url, time.time() - began_s + SCRAPED_S)
    lost = [sample for sample in samples if not sample.outcome.ok]
    causes = [sample.outcome.cause for sample in lost]
    kinds = Counter(f"{sample.arrival.tier} {sample.outcome.cause}" for sample in lost)
    return Measured(
        seconds=seconds,
        seed=seed,
        wanted=points_of(
            recorder.observations, traffic.started_at_s, "decision_replicas", kind="allocated"
        ),
        ready=tuple(pods.ready),
        counts={
            key: {edge: value - before.get(key, {}).get(edge, 0.0) for edge, value in row.items()}
            for key, row in after.items()
        },
        answers=sum(map(is_good, samples)) / len(samples),
        refused=sum(cause in {"http_429", "http_503"} for cause in causes) / len(samples),
        failed=dict(sorted(kinds.items())),
        starts_s=sorted(pods.starts_s.values()),
        busy_ratio=used,
        client_late_s=max(sample.sent_s - sample.intended_s for sample in samples),
        machine=f"{measured_on()} Prometheus scraped every {SCRAPE_PERIOD}.",
    )


def busy_ratio(before: Any, after: Any) -> float:  # noqa: ANN401 - psutil's
    """Return the share of the machine's processor that was in use between two readings."""
    idle, total = (
        sum(getattr(after, name) - getattr(before, name) for name in names)
        for names in (("idle", "iowait"), [n for n in after._fields if not n.startswith("guest")])
    )
    return 1.0 - float(idle) / float(total)


def side_of(run: Measured) -> Side:
    """Return the node's side of the comparison."""

    def pair(key: str, edge: float) -> tuple[float, float]:
        counts = run.counts[key]
        return counts[edge], counts[math.inf]

    waits = {tier: pair(f"{HISTOGRAMS[0]} {tier}", WAIT_EDGE_S) for tier in TIER_LABELS}
    steps = pair(HISTOGRAMS[1], STEP_EDGE_S)
    return Side(run.wanted, run.ready, attained(waits, steps, run.answers), run.refused)


def render(run: Measured, runs: list[Side], cold_start_s: float) -> str:
    """Return the section of RESULTS.md."""
    node, late = side_of(run), run.counts[HISTOGRAMS[2]]
    p50_s, p99_s = (edge_of(late, ratio) for ratio in (0.5, 0.99))
    reasons = voids(p99_s, run.busy_ratio)
    verdict = f"**Void: {'; '.join(reasons)}.** It shows nothing about the simulator."
    starts = run.starts_s
    rates = [row.rate_per_s for row in phases_of(run.seconds)]
    parts = [
        "    .venv/bin/python benchmarks/simulated/against_node.py",
        verdict if reasons else "The run is valid.",
        (
            f"`service.yaml` of this folder on the local node: real operator, Prometheus, router and engine pods, simulated H100 GPUs at speed 1. "
            f"A client sends {run.seconds:.0f} s of Poisson arrivals ({min(rates):.0f} to {max(rates):.0f} requests/s, all tiers, no retries) from a "
            f"file, and `fleetkeeper simulate` plays the same file, with {len(runs)} seeds for what is random in it (the router's choice, "
            f"the offset of scrapes). It starts pods in {cold_start_s:.1f} s: the median of {len(starts)} measured starts "
            f"({starts[0]:.0f} to {starts[-1]:.0f} s)."
            if starts
            else "No pod started."
        ),
        (
            f"Lateness of {late[math.inf]:,.0f} steps: P50 at most {1e3 * p50_s:g} ms, P99 at most {1e3 * p99_s:g} ms (void above 20 ms). Processor "
            f"of the machine in use: {run.busy_ratio:.0%} (void from 50%). The client sent at most {1e3 * run.client_late_s:.0f} ms late."
        ),
        markdown_table(
            ["replicas", "within one, of the time", "mean difference", "largest", "90% within one"],
            replica_rows(node, runs, run.seconds),
        ),
        markdown_table(
            ["attained", "node", "simulated", "difference, points", "within 3 points"],
            attainment_rows(node, runs),
        ),
        (
            "Queue wait and batch time: within the objectives, by the engines' own histograms, added up over all pods of the run. Answers: "
            "TTFT within 2 s and time per token within 50 ms, as the client sees it, of all requests. "
            f"Refused: {node.refused:.1%} on the node, {median(side.refused for side in runs):.1%} simulated. "
            f"Failed on the node, by tier and cause: {run.failed or 'none'}."
        ),
        "![Replicas over time on both sides](replicas.png)",
        run.machine,
    ]
    return "\n\n".join(parts)


def draw(run: Measured, runs: list[Side], arrivals: tuple[Arrival, ...], file: Path) -> None:
    """Write the figure: requests, desired and ready replicas over time."""
    node = side_of(run)
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    load, *panels = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2, 2))
    load.hist([row.at_s for row in arrivals], bins=int(run.seconds // 10), color="#7f8c8d",
              weights=[0.1] * len(arrivals))  # fmt: skip
    load.set_ylabel("requests/s")
    for axis, name, ours, theirs in (
        (panels[0], "desired replicas", node.wanted, [side.wanted for side in runs]),
        (panels[1], "ready replicas", node.ready, [side.ready for side in runs]),
    ):
        for number, points in enumerate(theirs):
            label = f"simulated, {len(runs)} seeds" if number == 0 else None
            axis.step(*zip(*points, strict=True), where="post", color="#d35400", alpha=0.5, label=label)  # fmt: skip
        axis.step(*zip(*ours, strict=True), where="post", color="#1f618d", linewidth=2, label="node")  # fmt: skip
        axis.set_ylabel(name)
        axis.set_ylim(0, 9)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    panels[-1].set_xlabel("seconds since the first request")
    panels[-1].set_xlim(0, run.seconds)
    figure.savefig(file, dpi=100)


def main() -> None:
    """Measure, simulate, compare, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seconds", type=float, default=900.0, help="of the trace")
    parser.add_argument("--seed", type=int, default=7, help="of the requests")
    parser.add_argument("--seeds", type=int, default=5, help="of the simulator")
    parser.add_argument("--measured", type=Path, help="do not measure; compare this file again")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/simulated"))
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.measured:
        run = restored(json.loads(args.measured.read_text()))
    else:
        run = measure(planned(args.seconds, args.seed), args.seconds, args.seed)
        (args.out / "measured.json").write_text(json.dumps(asdict(run)) + "\n")
    arrivals = planned(run.seconds, run.seed)
    file = args.out / "trace.csv"
    file.write_text(trace_text(arrivals))
    cold_start_s = median(run.starts_s) if run.starts_s else None
    runs = [simulated(file, run.seconds, cold_start_s, seed + 1) for seed in range(args.seeds)]
    text = render(run, runs, cold_start_s or 0.0)
    draw(run, runs, arrivals, (HERE if args.write else args.out) / "replicas.png")
    if args.write:
        write_section(HEADING, text, HERE / "RESULTS.md", TITLE)
    print(text)


def restored(row: dict[str, Any]) -> Measured:
    """Return what was written as JSON."""
    row["counts"] = {
        key: {float(edge): value for edge, value in counts.items()}
        for key, counts in row["counts"].items()
    }
    return Measured(**row)


if __name__ == "__main__":
    main()
