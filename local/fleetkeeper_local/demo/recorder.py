"""The control loop's view of a run: its gauges and decisions, read every 2 s.

They come from the leading operator through the API server, as `fleetkeeper top` reads them, so a
kubeconfig is enough and a stopped Prometheus leaves no gap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fleetkeeper.fleet.source import Fleet, FleetError, FleetSource
from fleetkeeper.fleet.view import Gauges

EVERY_S = 2.0
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """The fleet at one time of the wall clock; `gauges` is empty while no operator leads."""

    at_s: float
    gauges: Gauges
    ready: int
    """Replicas that receive requests."""


def points_of(
    observations: Sequence[Observation], start_s: float, name: str, **labels: str
) -> Points:
    """Return a gauge (without its prefix) over time, in seconds after `start_s`."""
    key = (name, tuple(sorted(labels.items())))
    return tuple(
        (observation.at_s - start_s, observation.gauges[key])
        for observation in observations
        if key in observation.gauges and observation.at_s >= start_s
    )


def ready_of(observations: Sequence[Observation], start_s: float) -> Points:
    """Return the ready replicas over time, in seconds after `start_s`."""
    return tuple(
        (observation.at_s - start_s, float(observation.ready))
        for observation in observations
        if observation.at_s >= start_s
    )


class Recorder:
    """A thread that records the fleet while its block runs."""

    def __init__(
        self, kubeconfig: Path, operator_namespace: str, namespace: str, name: str
    ) -> None:
        """Read as `fleetkeeper top` does, with the same kubeconfig."""
        self._source = FleetSource(operator_namespace, kubeconfig=str(kubeconfig))
        self._namespace, self._name = namespace, name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._decisions: dict[tuple[str, ...], dict[str, Any]] = {}
        self.observations: list[Observation] = []
        self.fleet = Fleet([], {})
        """The complete last reading."""

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """All decisions seen, oldest first; the status itself has the last ten."""
        return sorted(self._decisions.values(), key=lambda row: str(row["time"]))

    def __enter__(self) -> Self:
        """Start recording."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Record once more, then stop."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            last = self._over.is_set()
            self._observe()
            if last:
                return
            next_s = max(next_s + EVERY_S, time.monotonic())
            self._over.wait(next_s - time.monotonic())

    def _observe(self) -> None:
        try:
            self.fleet = self._source.read_fleet(self._namespace)
        except FleetError:
            return  # a gap in the record; the demo kills and stops parts on purpose
        at_s = time.time()
        for service in self.fleet.services:
            if service["metadata"]["name"] == self._name:
                self._keep(service.get("status") or {}, at_s)

    def _keep(self, status: dict[str, Any], at_s: float) -> None:
        gauges = self.fleet.gauges.get((self._namespace, self._name), {})
        self.observations.append(Observation(at_s, gauges, int(status.get("readyReplicas") or 0)))
        for row in status.get("decisions") or ():
            key = tuple(str(row.get(part, "")) for part in ("time", "what", "from", "to"))
            self._decisions[key] = row
