"""The comparison: each case played with every seed, and its figures with their spread over the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, NamedTuple

from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.arguments import FLEETKEEPER, Alternative, Batch, Faults, Kind
from fleetkeeper.simulate.autoscalers import (
    Autoscaler,
    ControlLoop,
    Hpa,
    Static,
    concurrency,
    waiting,
)
from fleetkeeper.simulate.batch_figures import BatchFigures, BatchRun, batch_run
from fleetkeeper.simulate.closed_loop import EPOCH_S, Fault, Load, Scenario, run
from fleetkeeper.simulate.loads.arrivals import Mix, untiered
from fleetkeeper.simulate.outcome import Outcome, Targets, TierOutcome
from fleetkeeper.simulate.recorder import DecisionMade, Moment, Recorder, moment_s
from fleetkeeper.simulate.service_model import ServiceModel, advisory_settings
from fleetkeeper_contract.tiers import TIER_LABELS


@dataclass(frozen=True, slots=True)
class Case:
    """An autoscaler with a service."""

    model: ServiceModel
    alternative: Alternative = FLEETKEEPER
    what_if: str = ""
    """The field that differs from the file, if any."""

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.alternative.name} {self.what_if}".strip()


@dataclass(frozen=True, slots=True)
class Setting:
    """The common parameters of all cases. Seeds are 1, 2, ..."""

    load: Load
    seconds: float
    targets: Targets = field(default_factory=Targets)
    seeds: int = 5
    faults: Faults = field(default_factory=Faults)
    batches: tuple[Batch, ...] = ()
    line: Mix = field(default_factory=Mix)
    """Tokens of a line of `batches`."""
    start: int | None = None
    """Replicas that are ready at the start, except of a fixed fleet. None: minReplicas."""


class Spread(NamedTuple):
    """The median over the seeds, the least and the most; NaN if no seed has a value."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a case by name, the figures of its tiers, and the time line of seed 1."""

    case: Case
    figures: Mapping[str, Spread]
    tiers: Mapping[str, Mapping[str, Spread]]
    moments: tuple[Moment, ...]
    batch: BatchFigures | None = None
    """The figures of its batches; None without batches."""
    decided: tuple[DecisionMade, ...] = ()
    """What Fleetkeeper decided with seed 1, in the order of time."""

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.case.name


FIGURES: Final[Mapping[str, Callable[[Outcome], float]]] = {
    "slo_attainment": lambda o: o.attainment,
    "goodput_per_s": lambda o: o.goodput_per_s,
    "queue_wait_attainment": lambda o: o.wait_attainment,
    "batch_time_attainment": lambda o: o.batch_attainment,
    "ttft_p50_s": lambda o: o.ttft_quantiles_s(0.5)[0],
    "ttft_p95_s": lambda o: o.ttft_quantiles_s(0.95)[0],
    "tpot_p50_s": lambda o: o.tpot_quantiles_s(0.5)[0],
    "tpot_p95_s": lambda o: o.tpot_quantiles_s(0.95)[0],
    "requests": lambda o: o.arrivals,
    "refused": lambda o: o.total_refused,
    "lost": lambda o: o.total_lost,
    "unfinished": lambda o: o.unfinished,
    "preemptions": lambda o: o.preemptions,
    "replica_hours": lambda o: o.replica_hours,
    "gpu_hours": lambda o: o.gpu_hours,
    "most_replicas": lambda o: o.most_replicas,
    "replica_changes": lambda o: len(o.changes()),
    "replica_reversals": lambda o: o.reversals(),
    "engine_cpu_s": lambda o: o.engine_s,
    "control_cpu_s": lambda o: o.control_s,
}
TIER_FIGURES: Final[Mapping[str, Callable[[TierOutcome], float]]] = {
    "requests": lambda tier: tier.arrived,
    "slo_attainment": lambda tier: tier.attainment,
    "refused": lambda tier: tier.refused,
    "lost": lambda tier: tier.lost,
}

Progress = Callable[[Case, int, float], None]
"""Gets the case, the seed and the seconds played."""


def compare(
    cases: Sequence[Case], setting: Setting, progress: Progress = lambda *_: None
) -> tuple[Result, ...]:
    """Play every case with every seed. The same seed gives every case the same requests."""
    return tuple(_result(case, setting, progress) for case in cases)


def fixed_fleet_of(
    results: Sequence[Result], setting: Setting, progress: Progress = lambda *_: None
) -> tuple[tuple[Result, ...], tuple[str, ...]]:
    """Return the smallest fixed fleet that is enough, if it is not yet compared, and notes for the user."""
    case, figures = results[0].case, results[0].figures
    found = smallest_fixed(case, setting, int(figures["most_replicas"].median), progress)
    if found is None:
        settings = case.model.settings
        most, asked = settings.max_replicas, settings.attainment_ratio
        return (), (f"no fixed fleet up to scaling.maxReplicas ({most}) reaches {asked:.0%}",)
    if any(result.name == found.name for result in results):
        return (), ()
    return compare([found], setting, progress), ()


def smallest_fixed(
    case: Case, setting: Setting, guess: int, progress: Progress = lambda *_: None
) -> Case | None:
    """Return the smallest fixed fleet up to maxReplicas that attains what the service asks, or None.

    By bisection with seed 1, because attainment grows with the replicas. It begins at `guess`, so that
    the time depends on the load more than on maxReplicas.
    """
    settings = case.model.settings

    def attains(replicas: int) -> bool:
        fixed = fixed_fleet(case, replicas)
        outcome, _ = run(
            scenario_of(fixed, setting, 1), lambda seconds: progress(fixed, 1, seconds)
        )
        return outcome.attainment >= settings.attainment_ratio

    low, high = 1, max(1, min(guess, settings.max_replicas))
    while not attains(high):
        if high == settings.max_replicas:
            return None
        low, high = high + 1, min(2 * high, settings.max_replicas)
    while low < high:
        middle = (low + high) // 2
        if attains(middle):
            high = middle
        else:
            low = middle + 1
    return fixed_fleet(case, high)


def fixed_fleet(case: Case, replicas: int) -> Case:
    """Return `static:N` of the same service."""
    return Case(case.model, Alternative(f"{Kind.STATIC}:{replicas}", Kind.STATIC, replicas))


def _result(case: Case, setting: Setting, progress: Progress) -> Result:
    figures: dict[str, list[float]] = {name: [] for name in FIGURES}
    tiers: dict[str, dict[str, list[float]]] = {
        tier: {name: [] for name in TIER_FIGURES} for tier in TIER_LABELS
    }
    moments: tuple[Moment, ...] = ()
    decided: tuple[DecisionMade, ...] = ()
    runs: list[BatchRun] = []
    for seed in range(1, setting.seeds + 1):
        scenario = scenario_of(case, setting, seed)
        outcome, recorder = run(
            scenario,
            lambda seconds, seed=seed: progress(case, seed, seconds),  # type: ignore[misc]
        )
        progress(case, seed, setting.seconds)
        if setting.batches:
            without, _ = run(replace(scenario, batches=()))
            runs.append(batch_run(outcome, without, _added(case, recorder)))
        for name, figure in FIGURES.items():
            figures[name].append(float(figure(outcome)))
        for tier, row in zip(TIER_LABELS, outcome.tiers, strict=True):
            for name, of_tier in TIER_FIGURES.items():
                tiers[tier][name].append(float(of_tier(row)))
        if seed == 1 and isinstance(recorder, Recorder):
            moments, decided = tuple(recorder.moments), recorder.decided
    return Result(
        case,
        {name: spread(values) for name, values in figures.items()},
        {
            tier: {name: spread(values) for name, values in row.items()}
            for tier, row in tiers.items()
        },
        moments,
        BatchFigures(setting.batches, tuple(runs)) if runs else None,
        decided,
    )


def _added(case: Case, recorder: Autoscaler) -> float:
    """Return the replicas that Fleetkeeper added for a deadline; NaN for others."""
    if case.alternative.kind is Kind.FLEETKEEPER and isinstance(recorder, Recorder):
        return float(recorder.added)
    return math.nan


def spread(values: Sequence[float]) -> Spread:
    """Return median, least and most of the known values."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Spread(math.nan, math.nan, math.nan)
    return Spread(median(known), min(known), max(known))


def scenario_of(case: Case, setting: Setting, seed: int) -> Scenario:
    """Return the scenario of a case and a seed."""
    model, alternative, faults = case.model, case.alternative, setting.faults
    stock = alternative.kind.is_stock
    tokens = alternative.tokens or model.engine.max_tokens
    engine = replace(model.engine, max_tokens=tokens)
    if stock:
        engine = replace(engine, queue_limits=None)
    replicas = model.settings.min_replicas if setting.start is None else setting.start
    if alternative.kind is Kind.STATIC:
        replicas = int(alternative.number)
    every_s = moment_s(setting.seconds)
    return Scenario(
        seconds=setting.seconds,
        load=untiered(setting.load) if stock else setting.load,
        autoscaler=lambda: Recorder(
            _autoscaler(alternative, model, tokens, faults),
            every_s,
            model.drain_s,
            faults.has_metrics,
            tiers=TIER_LABELS[:2] if setting.batches else TIER_LABELS,
        ),
        engine=engine,
        replicas=replicas,
        gpus=model.gpus,
        cold_start=model.cold_start,
        targets=setting.targets,
        removes_emptiest=not stock,
        routers=model.routers,
        pods_come=faults.has_gpus,
        crashes=tuple(Fault(at, number) for number, at in enumerate(faults.crashes)),
        seed=seed,
        batches=setting.batches,
        line=setting.line,
        batch_tier=1 if stock else 2,
    )


def _autoscaler(
    alternative: Alternative, model: ServiceModel, tokens: int, faults: Faults
) -> Autoscaler:
    settings = model.settings
    kind = alternative.kind
    if kind is Kind.STATIC:
        return Static()
    if kind in {Kind.HPA_CONCURRENCY, Kind.HPA_WAITING}:
        measure = concurrency if kind is Kind.HPA_CONCURRENCY else waiting
        return Hpa(measure, alternative.number, settings.min_replicas, settings.max_replicas)
    if kind is Kind.ADVISORY:
        settings = advisory_settings(settings, tokens)
    return _control_loop(settings, model, faults)


def _control_loop(settings: ControlSettings, model: ServiceModel, faults: Faults) -> ControlLoop:
    return ControlLoop(
        settings, metrics=lambda now: faults.has_metrics(now - EPOCH_S), gpus=model.gpus
    )
