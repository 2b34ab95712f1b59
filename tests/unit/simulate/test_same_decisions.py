"""The simulated control loop and the operator's decide the same from the same signals.

A simulation is recorded: what each tick read, and what it decided. The operator's own `ControlLoop` then
gets the same samples, pods, replicas and outcomes of limits requests through its source, cache and engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.rules.deadline import BATCH_DEADLINE
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings, LimitsRequest, PutOutcome
from fleetkeeper.reconcile.types import Kind, Workload
from fleetkeeper.runtime.autoscaler.inputs import parsed_service
from fleetkeeper.runtime.autoscaler.readings import Readings, Target
from fleetkeeper.runtime.queue import Key
from fleetkeeper.simulate.arguments import Batch, parse_batches
from fleetkeeper.simulate.autoscalers import ControlLoop
from fleetkeeper.simulate.closed_loop import EPOCH_S, Fault, Scenario, run
from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper_kube.reading import Place
from tests.support.autoscale.loop_world import START, World, send_requests

pytestmark = pytest.mark.slow

SECONDS = 600.0
MIX = Mix(1000.0, 200.0, (0.2, 0.5, 0.3))
NAME = "chat"


def rate(second: float) -> float:
    """Return the arrivals per second: a step up after two minutes, and down again."""
    return 40.0 if 120.0 <= second < 420.0 else 4.0


@dataclass
class Recorded:
    """The ticks of a simulation: inputs and decisions."""

    ticks: list[tuple[ControlInputs, ControlDecision]] = field(default_factory=list)

    def note(self, inputs: ControlInputs, decision: ControlDecision) -> None:
        """Keep a tick."""
        self.ticks.append((inputs, decision))


class Replay(World):
    """The operator's loop at the network's edge of a recorded simulation."""

    inputs: ControlInputs
    next_inputs: ControlInputs

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """Return the samples that the simulated tick read."""
        assert now == self.clock
        self.asked.append(targets)
        inputs, key = self.inputs, Key("team-a", NAME)
        lost = frozenset({key}) if inputs.prometheus_lost else frozenset()
        backlogs = {} if inputs.backlog is None else {key: inputs.backlog}
        return Readings(
            {key: inputs.samples}, lost, checks=inputs.checks_directly, backlogs=backlogs
        )

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """Return the outcome that the simulated engine gave."""
        self.puts += requests
        outcomes = {outcome.pod: outcome for outcome in self.next_inputs.put_outcomes}
        return [outcomes[request.pod] for request in requests]

    def show(self, number: int, inputs: ControlInputs, following: ControlInputs) -> None:
        """Set the clock, the Deployment and the pods to those of a simulated tick."""
        self.clock = START + 5.0 * number
        self.inputs, self.next_inputs = inputs, following
        engine = Workload(
            Kind.DEPLOYMENT, NAME, f"d-{NAME}", "1", "digest",
            desired_replicas=inputs.replicas, template_hash="t1", accelerators=1,
        )  # fmt: skip
        self._put("Deployment", engine, NAME)
        there = {pod.name for pod in self.cache.pods(Key("team-a", NAME))}
        for name in there - {view.name for view in inputs.pods}:
            self.version += 1
            self.cache.gone(Place("Pod", "team-a", name, self.version))
        for view in inputs.pods:
            self.put_pod(
                NAME,
                view.name,
                created=view.created,
                ready=view.ready,
                ready_since=view.ready_since,
                deleting=view.deleting,
                ip=view.ip,
            )


def new_world() -> tuple[Replay, ControlSettings]:
    """Return a world with a reconciled service, and the settings of its spec."""
    world = Replay()
    world.put_service(
        NAME,
        status={"observedGeneration": 1},
        scaling={"minReplicas": 1, "maxReplicas": 8, "scaleDownDelaySeconds": 60},
    )
    entry = world.cache.service(Key("team-a", NAME))
    assert entry is not None
    service = parsed_service(entry.unpack(), floating_revisions=False)
    assert service is not None
    return world, settings_of(service.spec, service.generation)


def recorded(
    settings: ControlSettings, seed: int, batches: tuple[Batch, ...] = ()
) -> list[tuple[ControlInputs, ControlDecision]]:
    """Simulate ten minutes with refused limits, an outage of Prometheus and a crash."""
    found = Recorded()
    loop = ControlLoop(
        settings,
        metrics=lambda now: not 300 <= now - EPOCH_S < 345,
        puts=lambda now: not 180 <= now - EPOCH_S < 195,
        on_tick=found.note,
    )
    run(
        Scenario(
            SECONDS,
            poisson(rate, 40.0, MIX),
            lambda: loop,
            cold_start=ColdStart(40.0),
            crashes=(Fault(380.0),),
            seed=seed,
            tail_s=0.0,
            batches=batches,
            line=MIX,
        )
    )
    return found.ticks


@pytest.mark.parametrize("seed", [1, 7])
async def test_the_operator_decides_as_the_simulated_loop_does(seed: int) -> None:
    """Limits, admission and replicas are equal in every tick, and both of them change."""
    world, settings = new_world()
    ticks = recorded(settings, seed)
    await assert_same(world, ticks)
    assert_changes(ticks)


async def test_the_operator_decides_the_same_for_a_deadline() -> None:
    """A backlog that needs more replicas than the others do."""
    world, settings = new_world()
    ticks = recorded(settings, 1, parse_batches(["30M@9m,30s"]))
    await assert_same(world, ticks)
    reasons = {decision.replicas.reason for _, decision in ticks if decision.replicas.valid}
    assert BATCH_DEADLINE in reasons
    assert {inputs.backlog is None for inputs, _ in ticks} == {True, False}


async def assert_same(
    world: Replay, ticks: Sequence[tuple[ControlInputs, ControlDecision]]
) -> None:
    """Replay the ticks with the operator's loop, and compare what it sends and allocates."""
    asked_before = False
    for number, ((inputs, decision), (following, _)) in enumerate(pairwise(ticks)):
        world.show(number, inputs, following)
        world.puts.clear()
        await world.loop.tick()
        await send_requests(world.loop)
        view = world.loop.view(Key("team-a", NAME))
        assert not view.is_pending
        assert by_pod(world.puts) == by_pod(decision.puts), f"limits of tick {number}"
        allocation = view.allocation
        allocated = inputs.replicas if allocation is None else allocation.replicas
        assert allocated == following.replicas, f"replicas of tick {number}"
        assert [target.directly for target in world.asked[-1]] == [asked_before]
        asked_before = decision.asks_pods
    assert len(ticks) == SECONDS / 5 + 1


def by_pod(puts: Sequence[LimitsRequest]) -> list[LimitsRequest]:
    """Return limits requests sorted by pod: their order has no meaning."""
    return sorted(puts, key=lambda put: put.pod)


def assert_changes(ticks: Sequence[tuple[ControlInputs, ControlDecision]]) -> None:
    """Check that the record holds what the comparison is for."""
    puts = [put for _, decision in ticks for put in decision.puts]
    assert len({put.limits.sequences for put in puts}) > 1, "sequences change"
    assert len({put.limits.tokens for put in puts}) > 1, "tokens change"
    assert len({put.admission for put in puts}) > 1, "admission changes"
    replicas = [inputs.replicas for inputs, _ in ticks]
    changes = [b - a for a, b in pairwise(replicas) if a != b]
    assert any(change > 0 for change in changes), "replicas are added"
    outcomes = [row for inputs, _ in ticks for row in inputs.put_outcomes]
    assert {row.succeeded for row in outcomes} == {True, False}
    assert {inputs.prometheus_lost for inputs, _ in ticks} == {True, False}
