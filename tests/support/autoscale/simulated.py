"""The shipped control loop against simulated engines, under a load given as a rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise

from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.autoscalers import ControlLoop, always
from fleetkeeper.simulate.closed_loop import EPOCH_S, Scenario, run
from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.engine import H100_8B, EngineSpec
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper.simulate.outcome import Outcome, Tick


def as_modeled(_: float) -> float:
    """Return 1.0 at any time: steps take as long as the engine model says."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario of one service. Functions take seconds since the start; `rate` returns arrivals/s.

    `prometheus`: it is configured. `metrics`: it answers. `direct`: pods can be read directly. `puts`:
    engines accept limits. `prompt`, `generated`: mean tokens. `tiers`: shares of realtime, standard, batch.
    """

    seconds: float
    rate: Callable[[float], float]
    settings: ControlSettings = field(default_factory=ControlSettings)
    engine: EngineSpec = H100_8B
    replicas: int = 1
    cold_start_s: float = 60.0
    prompt: float = 1000.0
    generated: float = 200.0
    tiers: tuple[float, float, float] = (0.0, 1.0, 0.0)
    prometheus: bool = True
    metrics: Callable[[float], bool] = always
    direct: Callable[[float], bool] = always
    puts: Callable[[float], bool] = always
    pods_come: Callable[[float], bool] = always
    slowness: Callable[[float], float] = as_modeled
    seed: int = 1

    def scenario(self) -> Scenario:
        """Return the scenario, with a Poisson load and a constant cold start."""
        most = max([self.rate(second) for second in range(int(self.seconds) + 1)])
        return Scenario(
            self.seconds,
            poisson(self.rate, most, Mix(self.prompt, self.generated, self.tiers)),
            self._loop,
            self.engine,
            replicas=self.replicas,
            cold_start=ColdStart(self.cold_start_s),
            pods_come=self.pods_come,
            slowness=self.slowness,
            seed=self.seed,
        )

    def _loop(self) -> ControlLoop:
        return ControlLoop(
            self.settings,
            prometheus=self.prometheus,
            metrics=lambda now: self.metrics(now - EPOCH_S),
            direct=lambda now: self.direct(now - EPOCH_S),
            puts=lambda now: self.puts(now - EPOCH_S),
        )


@dataclass(frozen=True)
class DecidedTick(Tick):
    """A row of the time line of the control loop, which always decides."""

    decision: ControlDecision


@dataclass(frozen=True, slots=True)
class Record:
    """The result of a case. `events`: seconds since the start, and the messages."""

    outcome: Outcome
    ticks: list[DecidedTick]
    events: list[tuple[float, str]]

    def replica_changes(self) -> list[tuple[float, int]]:
        """Return (time, difference) of every change of the replicas."""
        pairs = pairwise(self.ticks)
        return [(b.time, b.replicas - a.replicas) for a, b in pairs if b.replicas != a.replicas]


def played(case: Case) -> Record:
    """Play a case. The same case gives the same record."""
    outcome, loop = run(case.scenario())
    assert isinstance(loop, ControlLoop)
    names = [row.name for row in fields(Tick)]
    ticks = [DecidedTick(*[getattr(tick, name) for name in names]) for tick in outcome.ticks]
    return Record(outcome, ticks, [(now - EPOCH_S, event.message) for now, event in loop.events])
