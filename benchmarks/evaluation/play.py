"""Play one scene under one autoscaler, and keep the figures of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from scenes import Scene, scenes

from fleetkeeper.autoscale.capacity import demand, estimate, targets
from fleetkeeper.autoscale.rules import load_breaker, need, objectives, scale_down
from fleetkeeper.autoscale.rules.batch import cuts, decide
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.autoscalers import (
    Autoscaler,
    ControlLoop,
    Hpa,
    Static,
    concurrency,
    waiting,
)
from fleetkeeper.simulate.closed_loop import Scenario, run
from fleetkeeper.simulate.loads.arrivals import untiered


class Case(NamedTuple):
    """An autoscaler by name: fleetkeeper, hpa-concurrency, hpa-waiting or static, its target and tokens."""

    kind: str = "fleetkeeper"
    target: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        """Return the name as `fleetkeeper simulate --against` takes it."""
        if self.kind == "fleetkeeper":
            return self.kind
        return f"{self.kind}:{self.target}" + (f"@{self.tokens}" if self.tokens else "")


ALTERNATIVES = tuple(
    Case(kind, target, tokens)
    for tokens in (512, 0)
    for kind, all_targets in (
        ("hpa-concurrency", (10, 20, 30, 40, 60, 80)),
        ("hpa-waiting", (1, 5, 10, 20)),
    )
    for target in all_targets
)


@dataclass(frozen=True, slots=True)
class Job:
    """A run."""

    scene: str
    seed: int
    case: Case = field(default_factory=Case)
    attainment: float = 0.95
    """attainmentPercent / 100."""
    without: str = ""
    """The rule that is off."""
    traces: Path | None = None


def key_of(job: Job) -> str:
    """Return the name of a job in the results."""
    return f"{job.scene}|{job.case}|{job.seed}|{job.attainment}|{job.without}"


class Figures(NamedTuple):
    """The figures of a run. `wait`, `batch`: attainment of the objectives of the service."""

    attainment: float
    gpu_hours: float
    wait: float
    batch: float
    changes: int
    reversals: int
    refused: int
    most: int


_rejected_ratio = load_breaker.rejected_ratio


def _without_waiting(served_per_s: float, offered_per_s: float, waiting: float = 0.0) -> float:
    del waiting
    return _rejected_ratio(served_per_s, offered_per_s)


RULES: Mapping[str, tuple[tuple[Any, str, Any], ...]] = {
    "prefill wait in the capacity": ((targets, "prefill_wait_s", lambda *_: 0.0),),
    "mean demand (plan for the last 30 s)": (
        (
            estimate,
            "smoothed",
            lambda before, rate: demand.Demand(rate, before.seen + 1),
        ),
    ),
    "replicas kept after a surge": ((scale_down, "SURGE_DELAYS", 0.0),),
    "a queue must last": ((objectives, "LONG_QUEUE", 0.0),),
    "refused requests order without a model": (
        (need, "refuses", lambda *_: False),
        (need, "_sheds_batch", lambda *_: False),
    ),
    "tokens to the model's target at once": (
        (
            cuts,
            "_fewer_tokens",
            lambda view, limits, _: targets.moved_notch(limits.tokens, -1, view.settings),
        ),
    ),
    "limits": ((decide, "RULES", ()),),
    "shedding that drains the queue": ((load_breaker, "rejected_ratio", _without_waiting),),
}
"""What replaces a rule to switch it off: (module, name, value)."""


def play(job: Job) -> Figures:
    """Play one job."""
    scene = next(row for row in scenes(job.traces) if row.name == job.scene)
    kept = [(module, name, getattr(module, name)) for module, name, _ in RULES.get(job.without, ())]
    for module, name, value in RULES.get(job.without, ()):
        setattr(module, name, value)
    try:
        outcome, _ = run(scenario_of(scene, job))
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
    return Figures(
        outcome.attainment,
        outcome.gpu_hours,
        outcome.wait_attainment,
        outcome.batch_attainment,
        len(outcome.changes()),
        outcome.reversals(),
        outcome.total_refused,
        outcome.most_replicas,
    )


def scenario_of(scene: Scene, job: Job) -> Scenario:
    """Return the scenario of a job."""
    case = job.case
    engine = scene.engine
    if case.kind != "fleetkeeper":
        engine = replace(engine, queue_limits=None, max_tokens=case.tokens or engine.max_tokens)
    settings = ControlSettings(max_replicas=scene.max_replicas, attainment_ratio=job.attainment)

    def autoscaler() -> Autoscaler:
        if case.kind == "fleetkeeper":
            return ControlLoop(settings, gpus=scene.gpus)
        if case.kind == "static":
            return Static()
        measure = concurrency if case.kind == "hpa-concurrency" else waiting
        return Hpa(measure, case.target, 1, scene.max_replicas)

    return Scenario(
        scene.hours * 3600.0,
        scene.load if case.kind == "fleetkeeper" else untiered(scene.load),
        autoscaler,
        engine=engine,
        replicas=case.target if case.kind == "static" else scene.replicas,
        gpus=scene.gpus,
        cold_start=scene.cold_start,
        removes_emptiest=case.kind == "fleetkeeper",
        seed=job.seed,
    )
