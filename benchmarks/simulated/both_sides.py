"""One trace, what `fleetkeeper simulate` makes of it, and how two sides differ. Pure but for the trace's file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.commands.service.inputs import plan_inputs, read_inputs
from fleetkeeper.commands.simulate.inputs import hardware_of_profile, read_model
from fleetkeeper.simulate.autoscalers import Asked, Autoscaler
from fleetkeeper.simulate.closed_loop import run
from fleetkeeper.simulate.cluster import Cluster, ColdStart
from fleetkeeper.simulate.comparison import Case, Setting, scenario_of
from fleetkeeper.simulate.loads.arrivals import trace
from fleetkeeper.simulate.loads.trace_file import parse_trace
from fleetkeeper.simulate.outcome import Targets
from fleetkeeper_contract.tiers import TIER_LABELS
from fleetkeeper_local.demo.recorder import Points
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival, Phase, Shape, plan_arrivals

SERVICE = Path(__file__).resolve().parent / "service.yaml"
SHAPE = Shape(prompt_tokens=(64, 512), output_tokens=(256, 768))
RAMP_STEPS = 8
TARGETS = Targets()
MAX_LATE_S = 0.02
MAX_BUSY_RATIO = 0.5
MIN_WITHIN_RATIO = 0.9
"""Of the time: replicas of both sides differ by at most one."""
MAX_APART = 0.03
"""Of an attainment."""


@dataclass(frozen=True, slots=True)
class Side:
    """What one side did. Points are seconds since the start of the trace; figures are shares of 1."""

    wanted: Points
    ready: Points
    attained: Mapping[str, float]
    refused: float


# -- the trace --------------------------------------------------------------------------------------


def phases_of(seconds: float) -> list[Phase]:
    """Return the load: steady, a step up, a ramp, a burst, and down."""
    part = seconds / 30.0
    ramp = [
        Phase("ramp", 4 * part / RAMP_STEPS, 10 + 6 * (number + 1) / RAMP_STEPS)
        for number in range(RAMP_STEPS)
    ]
    return [
        Phase("steady", 4 * part, 5.0),
        Phase("step", 5 * part, 10.0),
        *ramp,
        Phase("burst", part, 24.0),
        Phase("after", 4 * part, 16.0),
        Phase("down", 12 * part, 4.0),
    ]


def planned(seconds: float, seed: int) -> tuple[Arrival, ...]:
    """Return the requests, the first at 0, at whole milliseconds."""
    rows = plan_arrivals(phases_of(seconds), SHAPE, seed)
    return tuple(replace(row, at_s=round(row.at_s - rows[0].at_s, 3)) for row in rows)


def trace_text(arrivals: Sequence[Arrival]) -> str:
    """Return the file that `fleetkeeper simulate --trace` reads."""
    rows = [
        f"{row.at_s:.3f},{row.prompt_tokens},{row.output_tokens},{row.tier}" for row in arrivals
    ]
    return "\n".join(["t_s,input_tokens,output_tokens,tier", *rows]) + "\n"


# -- the simulator's side ---------------------------------------------------------------------------


class Watched:
    """An autoscaler that keeps the cluster, for the counters of its engines."""

    def __init__(self, inner: Autoscaler) -> None:
        self.inner = inner
        self.interval_s = inner.interval_s
        self.control_s = 0.0
        self.cluster: Cluster | None = None

    def tick(self, cluster: Cluster, now: float) -> Asked | None:
        """Let the autoscaler decide."""
        self.cluster, self.control_s = cluster, self.inner.control_s
        return self.inner.tick(cluster, now)


def simulated(file: Path, seconds: float, cold_start_s: float | None, seed: int) -> Side:
    """Return what `fleetkeeper simulate -f SERVICE --trace FILE` plays. `cold_start_s`: None for its own."""
    checked = read_inputs([str(SERVICE)], plan_inputs(None), None).checked[0]
    hardware = hardware_of_profile(checked)
    model = read_model(checked, hardware)
    if cold_start_s is not None:
        model = replace(model, cold_start=ColdStart(cold_start_s))
    rows = parse_trace(file.name, file.read_bytes(), hardware.kv_capacity_tokens).rows
    scenario = scenario_of(Case(model), Setting(trace(rows), seconds, TARGETS), seed)
    watched = Watched(scenario.autoscaler())
    outcome, _ = run(replace(scenario, autoscaler=lambda: watched))
    if watched.cluster is None:
        raise AssertionError("the run had no tick")
    engines = watched.cluster.engines()
    columns = zip(*[engine.counts.counters for engine in engines], strict=True)
    sums = Counters._make(sum(column) for column in columns)
    waits = {
        tier: (getattr(sums, f"wait_within_{tier}"), getattr(sums, f"wait_count_{tier}"))
        for tier in TIER_LABELS
    }
    return Side(
        tuple((tick.time, float(tick.replicas)) for tick in outcome.ticks),
        tuple((tick.time, float(tick.ready)) for tick in outcome.ticks),
        attained(waits, (sums.batch_time_within, sums.batch_time_count), outcome.attainment),
        outcome.total_refused / outcome.arrivals,
    )


# -- figures ----------------------------------------------------------------------------------------


def attained(
    waits: Mapping[str, tuple[float, float]], steps: tuple[float, float], answered: float
) -> dict[str, float]:
    """Return attainments by name, from (within, all) of queue waits by tier and of steps."""
    total = tuple(map(sum, zip(*waits.values(), strict=True)))
    return {
        "queue wait": _share(*total),
        **{f"queue wait, {tier}": _share(*pair) for tier, pair in waits.items()},
        "batch time": _share(*steps),
        "answers": answered,
    }


def _share(within: float, count: float) -> float:
    return within / count if count else math.nan


def is_good(sample: Sample) -> bool:
    """Return whether a client got its answer within both targets."""
    if not sample.outcome.ok or sample.first_token_s is None:
        return False
    each_s = sample.outcome.time_per_token_s or 0.0  # one token has no time after it
    return sample.first_token_s <= TARGETS.ttft_s and each_s <= TARGETS.tpot_s


def edge_of(counts: Mapping[float, float], ratio: float) -> float:
    """Return the least edge of a cumulative histogram that bounds this share of it; NaN without values."""
    total = max(counts.values(), default=0.0)
    if not total:
        return math.nan
    return min(edge for edge, count in counts.items() if count >= ratio * total)


@dataclass(frozen=True, slots=True)
class Apart:
    """How two numbers of replicas differ over time: a share of the time, and replicas."""

    within_one: float
    most: float
    mean: float


def value_at(points: Points, at_s: float) -> float:
    """Return the last value up to a time; the first one before that."""
    known = [value for time_s, value in points if time_s <= at_s]
    return known[-1] if known else points[0][1]


def apart(one: Points, other: Points, seconds: float) -> Apart:
    """Return the differences, second by second."""
    rows = [
        abs(value_at(one, float(second)) - value_at(other, float(second)))
        for second in range(math.floor(seconds))
    ]
    return Apart(fmean(row <= 1.0 for row in rows), max(rows), fmean(rows))


def voids(late_p99_s: float, busy_ratio: float) -> list[str]:
    """Return why a run shows nothing: the machine had no time for the planned times of steps."""
    found = []
    if not late_p99_s <= MAX_LATE_S:
        found.append(f"P99 of steps' lateness {1e3 * late_p99_s:.0f} ms, above 20 ms")
    if not busy_ratio < MAX_BUSY_RATIO:
        found.append(f"{busy_ratio:.0%} of the machine's processor in use, not below half")
    return found


def replica_rows(node: Side, runs: Sequence[Side], seconds: float) -> list[list[str]]:
    """Return the table rows of replicas: differences of the node to the simulator's seeds."""
    rows = []
    for name, ours, theirs in (
        ("desired", node.wanted, [side.wanted for side in runs]),
        ("ready", node.ready, [side.ready for side in runs]),
    ):
        found = [apart(ours, points, seconds) for points in theirs]
        within = [row.within_one for row in found]
        rows.append(
            [
                name,
                f"{median(within):.0%} ({min(within):.0%} to {max(within):.0%})",
                f"{median(row.mean for row in found):.2f}",
                f"{median(row.most for row in found):.0f}",
                "met" if median(within) >= MIN_WITHIN_RATIO else "**missed**",
            ]
        )
    return rows


def attainment_rows(node: Side, runs: Sequence[Side]) -> list[list[str]]:
    """Return the table rows of attainments: node, median and span of the seeds, difference in points."""
    rows = []
    for name, ours in node.attained.items():
        theirs = [side.attained[name] for side in runs]
        points = ours - median(theirs)
        rows.append(
            [
                name,
                f"{ours:.1%}",
                f"{median(theirs):.1%} ({min(theirs):.1%} to {max(theirs):.1%})",
                f"{100 * points:+.1f}",
                "met" if abs(points) <= MAX_APART else "**missed**",
            ]
        )
    return rows
