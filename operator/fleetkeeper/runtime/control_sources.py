"""Where the control loop reads and writes: Prometheus, else the pods themselves; the engines' ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper.adapters.engine import Engines, Signer, read_signing_key
from fleetkeeper.adapters.keys import public_jwk
from fleetkeeper.adapters.prometheus import Prometheus, PrometheusError
from fleetkeeper.plan.control.constants import FRESH_S
from fleetkeeper.plan.control.exposed import Edges, edges_of
from fleetkeeper.plan.control.samples import PodSample
from fleetkeeper.plan.control.values import PodOrder, PodView, PutOutcome
from fleetkeeper.runtime.control_loop import Readings, Target
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.settings import SettingsError

log = structlog.get_logger(__name__)

SETTLED_S = 20.0
"""A pod that has been ready for so long was scraped by a healthy Prometheus (its interval is 5 s)."""


class MeasuredSource:
    """Prometheus for all services at once; the pods of those that it does not know, directly.

    Without a Prometheus every pod is read directly, and nothing counts as lost.
    """

    def __init__(
        self, prometheus: Prometheus | None, engines: Engines, *, may_send: Callable[[], bool]
    ) -> None:
        self._prometheus = prometheus
        self._engines = engines
        self._may_send = may_send
        self._is_answering = True
        self._with_model = False

    async def observe(self, targets: Sequence[Target], now: float) -> Readings:
        """The newest samples of the targets' pods, and which services Prometheus has nothing of."""
        if self._prometheus is None:
            return Readings(await self._scrape(targets))
        found = await self._ask(self._prometheus, targets, now)
        lost = [target for target in targets if is_lost(target, found.get(target.key, ()), now)]
        if not lost:
            return Readings(found)
        direct = await self._scrape(lost)
        return Readings({**found, **direct}, frozenset(target.key for target in lost))

    async def _ask(
        self, prometheus: Prometheus, targets: Sequence[Target], now: float
    ) -> dict[Key, tuple[PodSample, ...]]:
        """The step-time model's sums are asked for at every second tick: windows are two ticks long."""
        self._with_model = not self._with_model
        edges = {
            (target.key.namespace, target.key.name): edges_of(target.settings) for target in targets
        }
        try:
            found = await prometheus.observe_samples(edges, now, step_model=self._with_model)
        except PrometheusError as problem:
            if self._is_answering:
                log.warning("Prometheus is lost; pods are read directly", error=str(problem))
            self._is_answering = False
            return {}
        if not self._is_answering:
            log.info("Prometheus answers again")
        self._is_answering = True
        return {Key(*service): samples for service, samples in found.items()}

    async def _scrape(self, targets: Iterable[Target]) -> dict[Key, tuple[PodSample, ...]]:
        pods: list[tuple[Key, PodView, Edges]] = [
            (target.key, pod, edges_of(target.settings))
            for target in targets
            for pod in target.pods
            if pod.ready and pod.ip and not pod.deleting
        ]
        if not pods or not self._may_send():
            return {}
        rows = await self._engines.scrape_samples((pod, edges) for _, pod, edges in pods)
        home = {pod.name: key for key, pod, _ in pods}
        found: dict[Key, list[PodSample]] = {}
        for row in rows:
            found.setdefault(home[row.pod], []).append(row)
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
    ) -> None:
        self._engines = engines
        self._key = key
        self._kid = public_jwk(key.public_key())["kid"]
        self._epoch = epoch
        self._may_send = may_send
        self._silent: frozenset[str] = frozenset()

    async def put_limits(self, orders: Sequence[PodOrder]) -> Sequence[PutOutcome]:
        """An outcome for every order; pods that begin to refuse are logged once."""
        signer = Signer(self._key, self._kid, self._epoch())
        outcomes = await self._engines.put_limits(orders, signer, self._may_send)
        failed = {outcome.pod: outcome.detail for outcome in outcomes if not outcome.succeeded}
        _log_new(failed, self._silent)
        answered = {outcome.pod for outcome in outcomes if outcome.succeeded}
        self._silent = frozenset((self._silent | failed.keys()) - answered)
        return outcomes


def _log_new(failed: Mapping[str, str], known: frozenset[str]) -> None:
    for pod, detail in failed.items():
        if pod not in known:
            log.warning("limits not taken", pod=pod, error=detail)


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
