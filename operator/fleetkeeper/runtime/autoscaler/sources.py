"""The source of the control loop's samples: Prometheus, and the pods themselves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from fleetkeeper.adapters.engine import Engines
from fleetkeeper.adapters.prometheus import (
    PodKey,
    Prometheus,
    PrometheusError,
    PrometheusReading,
)
from fleetkeeper.autoscale.constants import FRESH_S
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.pod_history import age_of
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.signals.series_map import STEP_CLASSES, edges_of
from fleetkeeper.autoscale.types import ControlSettings, PodView
from fleetkeeper.runtime.autoscaler.readings import Readings, Target
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)

SETTLED_S = 20.0
"""Time after Ready from which a missing sample counts as Prometheus' fault (its scrape interval is 5 s)."""

STARTS_PER_TICK = 64
"""Pods that are not ready and are read in one tick, for the stage of their start."""


class MeasuredSource:
    """Prometheus for all services at once, and the pods themselves where Prometheus is not enough.

    A service's pods are read directly if Prometheus does not know them, if Prometheus has several
    series where one is expected, or if replicas or admission may be reduced. Without Prometheus every
    pod is read directly, and nothing counts as lost. Without `engines` no pod is ever called.
    However many services are lost, neither source takes longer than its deadline. Services for which
    no time was left are read first in the next tick.
    """

    def __init__(
        self,
        prometheus: Prometheus | None,
        engines: Engines | None,
        *,
        may_send: Callable[[], bool],
        monotonic: Callable[[], float],
        defects: Defects,
        deadline_s: float = 4.0,
    ) -> None:
        self._prometheus = prometheus
        self._engines = engines
        self._may_send = may_send
        self._monotonic = monotonic
        self._defects = defects
        self._deadline_s = deadline_s
        self._is_answering = True
        self._problems: tuple[str, ...] = ()
        self._disputed: frozenset[Key] = frozenset()
        self._step_classes = deque(STEP_CLASSES)
        self._read_at: dict[Key, float] = {}
        self._doubted: set[str] = set()

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """Return the newest samples of the targets' pods, and the services that Prometheus lost.

        Pods that need a direct read anyway are read during the Prometheus queries. So both take one
        deadline, not two.
        """
        self._forget_others(targets)
        reading_starts = asyncio.create_task(self._scrape_starts(targets))
        try:
            readings = await self._observe_ready(targets, now)
            return replace(readings, starts=await reading_starts)
        finally:
            reading_starts.cancel()

    async def _observe_ready(self, targets: Sequence[Target], now: float) -> Readings:
        if self._prometheus is None:
            return Readings(await self._scrape(targets))
        asking = asyncio.create_task(self._ask(self._prometheus, targets, now))
        try:
            first = [target for target in targets if self._is_known_to_need(target)]
            direct = await self._scrape(first)
            reading = await asking
        finally:
            asking.cancel()
        for target in targets:
            for pod in target.pods:
                problem = reading.defects.get((target.key.namespace, pod.name))
                if problem is not None:
                    self._defects.note("read_series", target.key, problem)
        found = _by_service(targets, reading.samples)
        disputed = self._note_disputes(targets, reading.disputed)
        lost = frozenset(
            target.key
            for target in targets
            if target.key not in disputed and is_lost(target, found[target.key], now)
        )
        asked = {target.key for target in first}
        rest = [row for row in targets if row.key in lost | disputed and row.key not in asked]
        direct |= await self._scrape(rest)
        used = lost | disputed | {target.key for target in targets if target.directly}
        samples = {
            key: _preferred(direct.get(key, ()) if key in used else (), rows)
            for key, rows in found.items()
        }
        return Readings(
            {key: rows for key, rows in samples.items() if rows},
            lost,
            disputed,
            checks=self._engines is not None,
            backlogs={Key(*service): found for service, found in reading.backlogs.items()},
        )

    def _is_known_to_need(self, target: Target) -> bool:
        return not self._is_answering or target.directly or target.key in self._disputed

    async def _ask(
        self, prometheus: Prometheus, targets: Sequence[Target], now: float
    ) -> PrometheusReading:
        """Query Prometheus, with the sums of one class of steps for the step-time model.

        The classes take turns, one per tick: their windows are two ticks long.
        """
        self._step_classes.rotate()
        pods: dict[PodKey, Edges] = {}
        for target in targets:
            pods |= {(target.key.namespace, pod.name): target.edges for pod in target.pods}
        try:
            reading = await prometheus.observe_samples(pods, now, step_class=self._step_classes[0])
        except PrometheusError as problem:
            if self._is_answering:
                log.warning("Prometheus unavailable", error=str(problem))
            self._is_answering = False
            return PrometheusReading({})
        if not self._is_answering:
            log.info("Prometheus available again")
        self._is_answering = True
        if reading.problems and not self._problems:
            log.warning("Prometheus queries failed", errors=list(reading.problems[:5]))
        elif self._problems and not reading.problems:
            log.info("Prometheus queries succeed again")
        self._problems = reading.problems
        return reading

    def _note_disputes(self, targets: Sequence[Target], pods: frozenset[PodKey]) -> frozenset[Key]:
        """Return the services of these pods; log when the first appears and when the last is gone.

        While Prometheus does not answer, disputes are unknown, and all services are lost.
        """
        if not self._is_answering:
            return frozenset()
        disputed = frozenset(
            target.key
            for target in targets
            if any((target.key.namespace, pod.name) in pods for pod in target.pods)
        )
        if disputed and not self._disputed:
            log.warning(
                "Prometheus has several series of a pod: reading it directly",
                pods=len(pods),
                example="/".join(min(pods)),
                setting="prometheusSelector",
            )
        elif self._disputed and not disputed:
            log.info("Prometheus has one series per pod again")
        self._disputed = disputed
        return disputed

    async def _scrape(self, targets: Sequence[Target]) -> dict[Key, tuple[PodSample, ...]]:
        """Read the pods of these services, least recently read first, and return their samples."""
        if self._engines is None or not targets or not self._may_send():
            return {}
        turns = sorted(targets, key=lambda target: self._read_at.get(target.key, 0.0))
        pods: list[tuple[Key, PodView, Edges]] = [
            (target.key, pod, target.edges)
            for target in turns
            for pod in target.pods
            if pod.ready and pod.ip and not pod.deleting
        ]
        rows = await self._engines.scrape_samples(
            [(pod, edges) for _, pod, edges in pods],
            deadline_s=self._deadline_s,
            doubted=self._doubted,
            on_defect=self._noting({pod.uid: key for key, pod, _ in pods}),
        )
        found: dict[Key, list[PodSample]] = {}
        for key, pod, _ in pods:
            sample = rows.get(pod.uid)
            if sample is not None:
                found.setdefault(key, []).append(sample)
        called = (key for key, pod, _ in pods if pod.uid in rows)
        self._read_at |= dict.fromkeys(called, self._monotonic())
        self._doubted -= rows.keys()
        self._doubted |= {uid for uid, sample in rows.items() if sample is None}
        return {key: tuple(samples) for key, samples in found.items()}

    async def _scrape_starts(self, targets: Sequence[Target]) -> dict[Key, tuple[PodSample, ...]]:
        """Read the pods that are not ready; they use the slots of pods that may not answer."""
        if self._engines is None or not self._may_send():
            return {}
        pods = [
            (target, pod)
            for target in targets
            for pod in target.pods
            if not pod.ready and pod.ip and not pod.deleting
        ][:STARTS_PER_TICK]
        if not pods:
            return {}
        rows = await self._engines.scrape_samples(
            [(pod, target.edges) for target, pod in pods],
            deadline_s=self._deadline_s,
            doubted={pod.uid for _, pod in pods},
            on_defect=self._noting({pod.uid: target.key for target, pod in pods}),
        )
        found: dict[Key, list[PodSample]] = {}
        for target, pod in pods:
            sample = rows.get(pod.uid)
            if sample is not None:
                found.setdefault(target.key, []).append(sample)
        return {key: tuple(samples) for key, samples in found.items()}

    def _noting(self, services: Mapping[str, Key]) -> Callable[[str, Exception], None]:
        """Return a function that records an error in reading a pod as a defect of its service."""

        def note(uid: str, problem: Exception) -> None:
            self._defects.note("read_pod", services[uid], problem)

        return note

    def _forget_others(self, targets: Sequence[Target]) -> None:
        """Forget all services and pods but these."""
        keys = {target.key for target in targets}
        self._read_at = {key: at for key, at in self._read_at.items() if key in keys}
        self._doubted &= {pod.uid for target in targets for pod in target.pods}


def _by_service(
    targets: Sequence[Target], samples: Mapping[PodKey, PodSample]
) -> dict[Key, tuple[PodSample, ...]]:
    return {
        target.key: tuple(
            sample
            for pod in target.pods
            if (sample := samples.get((target.key.namespace, pod.name))) is not None
        )
        for target in targets
    }


def _preferred(direct: Sequence[PodSample], others: Sequence[PodSample]) -> tuple[PodSample, ...]:
    """Return the direct samples, and the other samples of pods without a direct one."""
    known = {sample.pod for sample in direct}
    return (*direct, *(sample for sample in others if sample.pod not in known))


def is_lost(target: Target, samples: Sequence[PodSample], now: float) -> bool:
    """Return whether Prometheus should know pods of this service but has no fresh sample of any."""
    settled = {
        pod.name
        for pod in target.pods
        if pod.ready
        and not pod.deleting
        and pod.ready_since is not None
        and ((age_s := age_of(pod.ready_since, now)) is None or age_s >= SETTLED_S)
    }
    if not settled:
        return False
    return not any(
        row.pod in settled and (age_s := age_of(row.time, now)) is not None and age_s <= FRESH_S
        for row in samples
    )


async def read_pod(engines: Engines, pod: PodView) -> PodSample | None:
    """Return a direct sample of this pod; None if there is no usable answer.

    Counts within the objectives are not used here, so any bucket edges will do.
    """
    if not pod.ip:
        return None
    rows = await engines.scrape_samples([(pod, edges_of(ControlSettings()))])
    return rows.get(pod.uid)
