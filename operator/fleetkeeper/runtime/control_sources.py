"""Where the control loop reads and writes: Prometheus, else the pods themselves; the engines' ports."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper.adapters.engine import Engines, Signer, read_signing_key
from fleetkeeper.adapters.keys import public_jwk
from fleetkeeper.adapters.prometheus import PodKey, Prometheus, PrometheusError
from fleetkeeper.plan.control.constants import FRESH_S
from fleetkeeper.plan.control.edges import Edges
from fleetkeeper.plan.control.exposed import STEP_CLASSES, edges_of
from fleetkeeper.plan.control.samples import PodSample
from fleetkeeper.plan.control.values import PodOrder, PodView, PutOutcome
from fleetkeeper.runtime.control_loop import Readings, Target
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.settings import SettingsError

log = structlog.get_logger(__name__)

SETTLED_S = 20.0
"""A pod that has been ready for so long was scraped by a healthy Prometheus (its interval is 5 s)."""

SILENT_KEPT_S = 600.0
"""A pod that was sent nothing for so long is gone, or its refusal may be logged once more."""


class MeasuredSource:
    """Prometheus for all services at once; the pods of those that it does not know, directly.

    Without a Prometheus every pod is read directly, and nothing counts as lost. Without `engines` no
    pod is ever called. Neither takes longer than its deadline, however many services are lost: those
    whose turn did not come are read first in the next tick.
    """

    def __init__(
        self,
        prometheus: Prometheus | None,
        engines: Engines | None,
        *,
        may_send: Callable[[], bool],
        monotonic: Callable[[], float],
        deadline_s: float = 4.0,
    ) -> None:
        self._prometheus = prometheus
        self._engines = engines
        self._may_send = may_send
        self._monotonic = monotonic
        self._deadline_s = deadline_s
        self._is_answering = True
        self._step_classes = deque(STEP_CLASSES)
        self._read_at: dict[Key, float] = {}

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """The newest samples of the targets' pods, and which services Prometheus has nothing of.

        While Prometheus is down it is asked at the same time as the pods: one deadline, not two.
        """
        if self._prometheus is None:
            return Readings(await self._scrape(targets))
        asking = asyncio.create_task(self._ask(self._prometheus, targets, now))
        direct: dict[Key, tuple[PodSample, ...]] | None = None
        try:
            if not self._is_answering:
                direct = await self._scrape(targets)
            found = await asking
        finally:
            asking.cancel()
        lost = [target for target in targets if is_lost(target, found.get(target.key, ()), now)]
        keys = frozenset(target.key for target in lost)
        if direct is None:
            direct = await self._scrape(lost)
        return Readings(
            {**found, **{key: rows for key, rows in direct.items() if key in keys}}, keys
        )

    async def _ask(
        self, prometheus: Prometheus, targets: Sequence[Target], now: float
    ) -> dict[Key, tuple[PodSample, ...]]:
        """The step-time model's sums are asked for in turn, a class a tick: windows are two ticks long."""
        self._step_classes.rotate()
        pods: dict[PodKey, Edges] = {}
        for target in targets:
            edges = edges_of(target.settings)
            pods |= {(target.key.namespace, pod.name): edges for pod in target.pods}
        try:
            found = await prometheus.observe_samples(pods, now, step_class=self._step_classes[0])
        except PrometheusError as problem:
            if self._is_answering:
                log.warning("Prometheus is lost", error=str(problem))
            self._is_answering = False
            return {}
        if not self._is_answering:
            log.info("Prometheus answers again")
        self._is_answering = True
        return {
            target.key: tuple(
                sample
                for pod in target.pods
                if (sample := found.get((target.key.namespace, pod.name))) is not None
            )
            for target in targets
        }

    async def _scrape(self, targets: Sequence[Target]) -> dict[Key, tuple[PodSample, ...]]:
        """Samples of these services' pods, those first that were read the longest time ago."""
        if self._engines is None or not targets or not self._may_send():
            return {}
        turns = sorted(targets, key=lambda target: self._read_at.get(target.key, 0.0))
        pods: list[tuple[Key, PodView, Edges]] = [
            (target.key, pod, edges_of(target.settings))
            for target in turns
            for pod in target.pods
            if pod.ready and pod.ip and not pod.deleting
        ]
        rows = await self._engines.scrape_samples(
            [(pod, edges) for _, pod, edges in pods], deadline_s=self._deadline_s
        )
        found: dict[Key, list[PodSample]] = {}
        for (key, _, _), row in zip(pods, rows, strict=False):
            if row is not None:
                found.setdefault(key, []).append(row)
        known = {target.key for target in targets}
        called = (key for key, _, _ in pods[: len(rows)])
        self._read_at = {key: at for key, at in self._read_at.items() if key in known}
        self._read_at |= dict.fromkeys(called, self._monotonic())
        return {key: tuple(samples) for key, samples in found.items()}


def is_lost(target: Target, samples: Sequence[PodSample], now: float) -> bool:
    """Whether Prometheus should know pods of this service and has nothing fresh of any of them."""
    settled = {
        pod.name
        for pod in target.pods
        if pod.ready
        and not pod.deleting
        and pod.ready_since is not None
        and now - pod.ready_since >= SETTLED_S
    }
    if not settled:
        return False
    return not any(row.pod in settled and now - row.time <= FRESH_S for row in samples)


class SignedEngines:
    """The engines' control ports, with orders signed by the operator's key.

    `epoch` is asked at every tick: it is known once this process leads.
    """

    def __init__(
        self,
        engines: Engines,
        key: Ed25519PrivateKey,
        *,
        epoch: Callable[[], int],
        may_send: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._now = now
        self._key = key
        self._kid = public_jwk(key.public_key())["kid"]
        self._epoch = epoch
        self._may_send = may_send
        self._silent: dict[str, float] = {}

    async def put_limits(self, orders: Sequence[PodOrder]) -> Sequence[PutOutcome]:
        """An outcome for every order; pods that begin to refuse are logged once."""
        signer = Signer(self._key, self._kid, self._epoch())
        outcomes = await self._engines.put_limits(orders, signer, self._may_send)
        now = self._now()
        self._silent = {pod: at for pod, at in self._silent.items() if now - at < SILENT_KEPT_S}
        for outcome in outcomes:
            if outcome.succeeded:
                self._silent.pop(outcome.pod, None)
                continue
            if outcome.pod not in self._silent:
                log.warning("limits not taken", pod=outcome.pod, error=outcome.detail)
            self._silent[outcome.pod] = now
        return outcomes


class Keyless:
    """No control key: engines keep their start-up limits, and nothing is sent."""

    async def put_limits(self, orders: Sequence[PodOrder]) -> Sequence[PutOutcome]:
        """Never asked: without a key no service is tuned."""
        return [
            PutOutcome(order.pod, order.generation, False, detail="no control key")
            for order in orders
        ]


def read_control_key(file: Path) -> Ed25519PrivateKey:
    """The private key that signs orders.

    Raises:
        SettingsError: The file cannot be read, or holds no Ed25519 private key in PEM.
    """
    try:
        return read_signing_key(file.read_bytes())
    except (OSError, TypeError, ValueError) as problem:
        raise SettingsError(
            f"the control key in {file} cannot be used: {problem}; "
            "make a pair with `fleetkeeper keys`"
        ) from problem
