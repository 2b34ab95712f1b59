"""The alternatives of a pool: each played with every seed, and its figures with their spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate.comparison import Spread, spread
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper.simulate.loads.patterns import NIGHT_RATIO, Pattern, rate_of
from fleetkeeper.simulate.outcome import quantiles
from fleetkeeper.simulate.pool.services import AlwaysOn, Keda, KedaLike, Member, Service
from fleetkeeper.simulate.pool.sleepers import Operator
from fleetkeeper.simulate.pool.world import PATIENCE_S, Tally, World

DAY_S: Final = 86_400.0


class Kind(StrEnum):
    """The ways to run a pool."""

    ALWAYS_ON = "always-on"
    """Ignores the budget: the reference of cost."""
    KEDA = "keda"
    FLEETKEEPER = "fleetkeeper"


@dataclass(frozen=True, slots=True)
class Case:
    """A pool, and what runs it."""

    kind: Kind
    members: tuple[Member, ...]
    what_if: str = ""
    """The field that differs from the file, if any."""

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.kind} {self.what_if}".strip()


@dataclass(frozen=True, slots=True)
class Setting:
    """The common parameters of all cases. Seeds are 1, 2, ..."""

    budget: Budget
    seconds: float = DAY_S
    seeds: int = 5
    failed_ratio: float = 0.0
    """Share of the starts that fail."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a case, in total and by service."""

    case: Case
    figures: Mapping[str, Spread]
    services: Mapping[str, Mapping[str, Spread]]

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.case.name


TALLIED: Final[Mapping[str, Callable[[Tally], float]]] = {
    "requests": lambda t: t.requests,
    "at_once": lambda t: _share(t.at_once, t.requests),
    "after_hold": lambda t: _share(t.after_hold, t.requests),
    "after_retry": lambda t: _share(t.after_retry, t.requests),
    "given_up": lambda t: _share(t.given_up, t.requests),
    "wait_p50_s": lambda t: quantiles(t.waits_s, (0.5,))[0],
    "wait_p95_s": lambda t: quantiles(t.waits_s, (0.95,))[0],
    "longest_without_turn_s": lambda t: t.longest_turn_s,
    "sleeps": lambda t: t.sleeps,
    "wakes": lambda t: t.wakes,
    "failed_starts": lambda t: t.failed_starts,
    "budget_wait": lambda t: _share(t.budget_wait_s, t.waking_s),
}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def zipf_rates(count: int, exponent: float, requests_per_day: float) -> tuple[float, ...]:
    """Return the mean requests a second of services whose popularity is 1, 1/2^s, 1/3^s, ..."""
    weights = [rank**-exponent for rank in range(1, count + 1)]
    return tuple(requests_per_day / DAY_S * weight / sum(weights) for weight in weights)


def with_load(members: Iterable[Member], rates: Iterable[float], mix: Mix) -> tuple[Member, ...]:
    """Return the services with Poisson arrivals over a day, at these mean rates."""
    found = []
    for member, rate in zip(members, rates, strict=True):
        highest = rate / ((1 + NIGHT_RATIO) / 2)
        load = poisson(rate_of(Pattern.DAY, highest, DAY_S), highest, mix)
        found.append(replace(member, load=load))
    return tuple(found)


def compare(
    cases: Iterable[Case], setting: Setting, progress: Callable[[Case, int], None] = lambda *_: None
) -> tuple[Result, ...]:
    """Play every case with every seed. The same seed gives every case the same requests."""
    results = []
    for case in cases:
        runs = []
        for seed in range(1, setting.seeds + 1):
            progress(case, seed)
            runs.append(play(case, setting, seed))
        services = {
            member.key[1]: _spreads([_figures([tallies[number]]) for _, tallies in runs])
            for number, member in enumerate(case.members)
        }
        figures = [{**_figures(tallies), **_gpus(world)} for world, tallies in runs]
        results.append(Result(case, _spreads(figures), services))
    return tuple(results)


def play(case: Case, setting: Setting, seed: int) -> tuple[World, list[Tally]]:
    """Play a case once; return the world at its end, and the tallies of its services."""
    world = World(setting.seconds)
    arguments = [
        (world, member, seed * 10_000 + number, setting.failed_ratio)
        for number, member in enumerate(case.members)
    ]
    services: Sequence[Service]
    if case.kind is Kind.FLEETKEEPER:
        operator = Operator(world, setting.budget)
        services = sleepers = [operator.add(*each[1:]) for each in arguments]
        operator.run()
        world.run(PATIENCE_S)
        for sleeper in sleepers:
            sleeper.close()
    elif case.kind is Kind.KEDA:
        services = scaled = [KedaLike(*each) for each in arguments]
        Keda(world, scaled, setting.budget)
        world.run(PATIENCE_S)
    else:
        services = fixed = [AlwaysOn(*each) for each in arguments]
        for service in fixed:
            service.begin()
        world.run(PATIENCE_S)
    return world, [service.tally for service in services]


def _figures(tallies: Sequence[Tally]) -> dict[str, float]:
    """Return the figures of services together."""
    total = Tally()
    for tally in tallies:
        for name in Tally.__slots__:
            value = getattr(total, name), getattr(tally, name)
            setattr(
                total, name, max(value) if name == "longest_turn_s" else sum(value[1:], value[0])
            )
    return {name: float(figure(total)) for name, figure in TALLIED.items()}


def _gpus(world: World) -> dict[str, float]:
    return {"gpu_hours": world.gpu_s / 3600.0, "peak_gpus": float(world.peak_gpus)}


def _spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    return {name: spread([row[name] for row in rows]) for name in rows[0]}
