"""The comparison: each case played with every seed, and its figures with their spread over the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, NamedTuple

from fleetkeeper.common.budget import Budget, ServiceKey
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
from fleetkeeper.simulate.closed_loop import EPOCH_S, Fault, Load, Scenario, run, run_together
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
    """The common parameters of all cases of a service. Seeds are 1, 2, ..."""

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
    service: ServiceKey = ("default", "service")
    number: int = 0
    """The place of the service among those that are played together: each has requests of its own."""
    share: int | None = None
    """The most accelerators of an HPA. None: no bound."""


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

MAX_SEEDS: Final = 100
"""The most seeds of a comparison."""

Progress = Callable[[Case, int, float], None]
"""Gets the case, the seed and the seconds played."""


def compare(
    cases: Sequence[Case], setting: Setting, progress: Progress = lambda *_: None
) -> tuple[Result, ...]:
    """Play every case with every seed. The same seed gives every case the same requests."""
    (results,) = compare_together([(cases, setting)], Budget(), progress)
    return results


def compare_together(
    services: Sequence[tuple[Sequence[Case], Setting]],
    budget: Budget,
    progress: Progress = lambda *_: None,
) -> list[tuple[Result, ...]]:
    """Play services side by side under a GPU budget: the first case of each, then the second, and so on.

    All have as many cases, seeds and seconds.
    """
    settings = [setting for _, setting in services]
    columns = [
        _results(cases, settings, budget, progress)
        for cases in zip(*(cases for cases, _ in services), strict=True)
    ]
    return list(zip(*columns, strict=True))


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


@dataclass(frozen=True, slots=True)
class _Run:
    """The figures of one service in one run."""

    figures: Mapping[str, float]
    tiers: Sequence[Mapping[str, float]]
    recorder: Autoscaler
    batch: BatchRun | None


def _results(
    cases: Sequence[Case], settings: Sequence[Setting], budget: Budget, progress: Progress
) -> list[Result]:
    """Play a case of each service together, with every seed."""
    first, setting = cases[0], settings[0]
    runs: list[list[_Run]] = [[] for _ in cases]
    for seed in range(1, setting.seeds + 1):
        scenarios = [scenario_of(*each, seed) for each in zip(cases, settings, strict=True)]
        played = run_together(
            scenarios,
            budget,
            lambda seconds, seed=seed: progress(first, seed, seconds),  # type: ignore[misc]
        )
        progress(first, seed, setting.seconds)
        for of_service, case, scenario, (outcome, recorder) in zip(
            runs, cases, scenarios, played, strict=True
        ):
            batch = None
            if scenario.batches:
                ((without, _),) = run_together([replace(scenario, batches=())], budget)
                batch = batch_run(outcome, without, _added(case, recorder))
            figures = {name: float(figure(outcome)) for name, figure in FIGURES.items()}
            tiers = [
                {name: float(figure(tier)) for name, figure in TIER_FIGURES.items()}
                for tier in outcome.tiers
            ]
            of_service.append(_Run(figures, tiers, recorder, batch))
    return list(map(_result, cases, settings, runs))


def _result(case: Case, setting: Setting, runs: Sequence[_Run]) -> Result:
    batches = [run.batch for run in runs if run.batch is not None]
    recorder = runs[0].recorder
    if not isinstance(recorder, Recorder):
        raise TypeError("a scenario of a comparison has a recorder")
    return Result(
        case,
        _spreads([run.figures for run in runs]),
        {
            tier: _spreads([run.tiers[number] for run in runs])
            for number, tier in enumerate(TIER_LABELS)
        },
        tuple(recorder.moments),
        BatchFigures(setting.batches, tuple(batches)) if batches else None,
        recorder.decided,
    )


def _spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


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
            _autoscaler(alternative, model, setting, tokens),
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
        seed=seed + MAX_SEEDS * setting.number,
        batches=setting.batches,
        line=setting.line,
        batch_tier=1 if stock else 2,
    )


def _autoscaler(
    alternative: Alternative, model: ServiceModel, setting: Setting, tokens: int
) -> Autoscaler:
    settings, faults = model.settings, setting.faults
    kind = alternative.kind
    if kind is Kind.STATIC:
        return Static()
    if kind in {Kind.HPA_CONCURRENCY, Kind.HPA_WAITING}:
        measure = concurrency if kind is Kind.HPA_CONCURRENCY else waiting
        least, most = settings.min_replicas, settings.max_replicas
        if setting.share is not None:
            most = max(least, min(most, setting.share // model.gpus))
        return Hpa(measure, alternative.number, least, most)
    if kind is Kind.ADVISORY:
        settings = advisory_settings(settings, tokens)
    return ControlLoop(
        settings,
        metrics=lambda now: faults.has_metrics(now - EPOCH_S),
        gpus=model.gpus,
        key=setting.service,
    )
