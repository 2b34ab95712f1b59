"""The control loop's state of each service between ticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.series_map import edges_of
from fleetkeeper.autoscale.types import ControlSettings, PutOutcome
from fleetkeeper.common.values import Remedy
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.runtime.autoscaler.inputs import (
    Fleet,
    observe_fleet,
    parsed_service,
    read_settings,
    starting_memory,
)
from fleetkeeper.runtime.autoscaler.readings import Target
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.reconciler.control_view import ControlView
from fleetkeeper.runtime.state.cache import Cache

PENDING: Final = ControlView(is_pending=True)


@dataclass(slots=True)
class ServiceState:
    """The loop's state of one service."""

    uid: str
    version: int
    service: InferenceService | None
    memory: ControlMemory
    view: ControlView = field(default_factory=lambda: PENDING)
    outcomes: tuple[PutOutcome, ...] = ()
    failed_writes: int = 0
    asks_pods: bool = False
    allocated: int | None = None
    settings: ControlSettings | None = None
    settings_mark: tuple[int, Remedy | None] | None = None

    def take(self, outcome: PutOutcome) -> None:
        """Record the outcome of a limits request for the next tick."""
        self.outcomes = (*self.outcomes, outcome)


@dataclass(frozen=True, slots=True)
class ServiceTick:
    """The state of one service in one tick."""

    key: Key
    state: ServiceState
    settings: ControlSettings
    fleet: Fleet
    edges: Edges

    @property
    def target(self) -> Target:
        """The measurements that this service needs."""
        return Target(self.key, self.edges, self.fleet.pods, self.state.asks_pods)


class ServiceStates:
    """The states of all services, read again from the cache when a service changes."""

    def __init__(
        self,
        cache: Cache,
        *,
        context: PlanContext,
        can_steer: bool,
        now: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._context = context
        self._can_steer = can_steer
        self._now = now
        self._states: dict[Key, ServiceState] = {}

    def get(self, key: Key) -> ServiceState | None:
        """Return the state of a service as it was in the last tick."""
        return self._states.get(key)

    def forget(self, key: Key) -> None:
        """Forget a deleted service."""
        self._states.pop(key, None)

    def service_tick(self, key: Key) -> ServiceTick | None:
        """Return a service's state for a tick; None if the loop does not decide the service."""
        state = self._current(key)
        if state is None or state.service is None or state.service.deleting:
            return None
        fleet = observe_fleet(self._cache, key, self._now())
        if fleet is None:
            return None
        settings = self._settings(state, state.service)
        return ServiceTick(key, state, settings, fleet, edges_of(settings))

    def _current(self, key: Key) -> ServiceState | None:
        entry = self._cache.service(key)
        if entry is None:
            return None
        state = self._states.get(key)
        if state is not None and (state.uid, state.version) == (entry.uid, entry.version):
            return state
        service = parsed_service(
            entry.unpack(), floating_revisions=self._context.floating_revisions
        )
        if state is None or state.uid != entry.uid or (state.service is None and service):
            memory = ControlMemory() if service is None else starting_memory(service, self._now())
            state = self._states[key] = ServiceState(entry.uid, entry.version, service, memory)
            return state
        state.version, state.service = entry.version, service
        return state

    def _settings(self, state: ServiceState, service: InferenceService) -> ControlSettings:
        """Return the settings of the spec and the remedy in force; parse again if one changed."""
        mark = (state.version, state.memory.remedy)
        if state.settings is None or state.settings_mark != mark:
            settings = read_settings(service, state.memory, self._context.catalog)
            if not self._can_steer:
                settings = replace(settings, batching_mode=BatchingMode.ADVISORY)
            state.settings, state.settings_mark = settings, mark
        return state.settings
