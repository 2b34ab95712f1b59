"""A service of a pool: its replicas, its clients, and two alternatives that know no sleep.

A client sends its request again after a refusal, until it loses patience: at `Retry-After` if the answer
has one, otherwise with exponential backoff.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.common.budget import Budget, Holding, ServiceKey
from fleetkeeper.simulate.closed_loop import EPOCH_S, MOVE_S, Load
from fleetkeeper.simulate.cluster import Cluster, SimulatedPod
from fleetkeeper.simulate.pool.world import PATIENCE_S, Asked, Tally, World
from fleetkeeper.simulate.requests import Request
from fleetkeeper.simulate.service_model import ServiceModel

BACKOFF_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses of a client after refusals without `Retry-After`; the last one repeats."""
POLL_S: Final = 30.0
"""KEDA's polling interval."""
COOLDOWN_S: Final = 300.0
"""KEDA's cooldown period."""


@dataclass(frozen=True, slots=True)
class Member:
    """A service with its load."""

    key: ServiceKey
    spec: InferenceServiceSpec
    model: ServiceModel
    load: Load


class Service:
    """One service in a run. The same `seed` gives every alternative the same requests."""

    def __init__(self, world: World, member: Member, seed: int, failed_ratio: float) -> None:
        self.world, self.member = world, member
        self.tally = Tally()
        self._random = Random(seed)  # noqa: S311 - seeded on purpose
        self._failed_ratio = failed_ratio
        self._waiting: set[Asked] = set()
        """Requests of clients that still try."""
        self._no_turn_since = EPOCH_S
        self._gpus = 0
        model = member.model
        self.cluster = Cluster(
            model.engine,
            Random(self._random.random()),  # noqa: S311 - as above
            model.cold_start,
            model.gpus,
            model.routers,
            drain_s=model.drain_s,
            on_lost=self._lost,
        )
        load = Random(self._random.random())  # noqa: S311 - as above
        self._next_arrival(iter(member.load(load)))

    @property
    def replicas(self) -> int:
        """The number of replicas while it is awake."""
        return self.member.spec.scaling.min_replicas

    def holding(self) -> Holding:
        """Return the accelerators of its pods."""
        cluster = self.cluster
        return Holding(cluster.wanted * cluster.gpus, len(cluster.draining) * cluster.gpus)

    # -- clients ------------------------------------------------------------------------------------

    def _next_arrival(self, load: Iterator[Request]) -> None:
        request = next(load, None)
        if request is None or request.arrived >= self.world.end - EPOCH_S:
            return
        request.arrived += EPOCH_S
        self.world.at(request.arrived, partial(self._arrive, Asked(request), load))

    def _arrive(self, request: Asked, load: Iterator[Request]) -> None:
        self._next_arrival(load)
        self.tally.requests += 1
        if not self._waiting:
            self._no_turn_since = self.world.now
        self._waiting.add(request)
        self.ask(request)

    def ask(self, request: Asked) -> None:
        """Answer a try, or refuse it."""
        if not self.send(request):
            self.refuse(request)

    def send(self, request: Asked) -> bool:
        """Send a request to a replica; return False if none takes it."""
        now = request.arrived = self.world.now
        if not self.cluster.route(request):
            return False
        self.tally.answered(request, now)
        self._left(request)
        self._no_turn_since = now
        return True

    def refuse(self, request: Asked, retry_s: float | None = None) -> None:
        """Let a client send its request again, or give up. `retry_s`: `Retry-After`, if it got one."""
        after_s = BACKOFF_S[min(request.tries, len(BACKOFF_S)) - 1] if retry_s is None else retry_s
        again = self.world.now + after_s
        if again > request.asked_at + PATIENCE_S:
            self.tally.given_up += 1
            self._left(request)
            return
        request.tries += 1
        self.world.at(again, partial(self.ask, request))

    def _left(self, request: Asked) -> None:
        """Note that a client waits no more: it was answered, or gave up."""
        waited_s = self.world.now - self._no_turn_since
        self.tally.longest_turn_s = max(self.tally.longest_turn_s, waited_s)
        self._waiting.remove(request)

    def _lost(self, requests: Iterable[Request]) -> None:
        if any(requests):
            raise AssertionError(f"{self.member.key}: a replica ended with requests")

    # -- replicas -----------------------------------------------------------------------------------

    def scale(self, replicas: int) -> None:
        """Create pods, or remove them."""
        before = set(self.cluster.pods)
        self.cluster.scale(replicas, self.world.now)
        for name in self.cluster.pods.keys() - before:
            self._begin(self.cluster.pods[name])
        self._move()

    def _begin(self, pod: SimulatedPod) -> None:
        self.world.at(pod.ready_at, partial(self._end_start, pod))
        if self._random.random() < self._failed_ratio:
            pod.ready_at = float("inf")

    def _end_start(self, pod: SimulatedPod) -> None:
        if pod.removed_at is not None:
            return
        if pod.ready_at == float("inf"):
            self.tally.failed_starts += not self.world.is_over
            self.start_failed(pod)
        else:
            self._move()
            self.became_ready()

    def start_failed(self, pod: SimulatedPod) -> None:
        """Start the container of a pod again, as the kubelet does."""
        pod.ready_at = self.world.now + self.cluster.cold_start.draw(self._random)
        self._begin(pod)

    def became_ready(self) -> None:
        """Act on a pod that became ready."""

    def _move(self) -> None:
        """End drained pods, and count the accelerators."""
        self.cluster.move(self.world.now)
        held = self.holding()
        gpus = held.claimed + held.leaving
        self.world.use(gpus - self._gpus)
        self._gpus = gpus
        if self.cluster.draining:
            self.world.at(self.world.now + MOVE_S, self._move)


class AlwaysOn(Service):
    """A service that keeps its replicas."""

    def begin(self) -> None:
        """Start with ready replicas."""
        self.cluster.begin(self.world.now, self.replicas)
        self._move()


class KedaLike(Service):
    """A service that KEDA scales between none and all of its replicas. Nothing holds its requests."""

    is_active = False
    _asked_at = -POLL_S
    _active_at = 0.0

    def ask(self, request: Asked) -> None:
        """Answer a try, or refuse it."""
        self._asked_at = self.world.now
        super().ask(request)

    def poll(self) -> None:
        """Decide whether the service is to have replicas: requests came, or run."""
        now = self.world.now
        for pod in self.cluster.pods.values():
            self.cluster.advance(pod, now)
        runs = any(pod.engine and not pod.engine.is_idle for pod in self.cluster.pods.values())
        if runs or now - self._asked_at < POLL_S:
            self.is_active, self._active_at = True, now
        elif self.is_active and now - self._active_at >= COOLDOWN_S:
            self.is_active = False
            if self.cluster.wanted:
                self.tally.sleeps += not self.world.is_over
                self.scale(0)


class Keda:
    """KEDA over all services, and the scheduler: pods wait for accelerators in the order of their creation."""

    def __init__(self, world: World, services: Sequence[KedaLike], budget: Budget) -> None:
        self._world, self._services, self._budget = world, services, budget
        self._pending: deque[KedaLike] = deque()
        world.every(POLL_S, self._poll)
        world.every(MOVE_S, self._schedule)

    def _poll(self) -> None:
        for service in self._services:
            service.poll()
            if service.is_active and not service.cluster.wanted and service not in self._pending:
                self._pending.append(service)

    def _schedule(self) -> None:
        self._pending = deque(each for each in self._pending if each.is_active)
        while self._pending:
            service = self._pending[0]
            held = [each.holding() for each in self._services]
            used = sum(each.claimed + each.leaving for each in held)
            needed = service.replicas * service.member.model.gpus
            if used + needed > (self._budget.total_gpus or needed):
                return
            self._pending.popleft()
            service.tally.wakes += not self._world.is_over
            service.scale(service.replicas)
