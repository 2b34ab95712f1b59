"""The wake marks of gateways, from the one ConfigMap that gateways write.

The operator never writes a mark; it only creates the ConfigMap if it is absent. While the ConfigMap
cannot be read, the last known marks still wake their services, and no service goes to sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from fleetkeeper.adapters.kubernetes.resources import CHILDREN
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.common.sleep import Wake
from fleetkeeper.reconcile.types import Kind
from fleetkeeper.runtime.queue import KeyedQueue, Urgency
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_contract.sleep import GATEWAY_KEY, WakeMark, parse_mark
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import UNREAD, Place, Unreadable, as_map, place_of, text
from fleetkeeper_kube.reflector import Reflector

log = structlog.get_logger(__name__)

CONFIG_MAP: Final = CHILDREN[Kind.CONFIG_MAP]
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
"""Time between two attempts to create the ConfigMap."""


class WakeMarks:
    """The marks by UID of the service: the sink and the observer of the ConfigMap's reflector.

    A service with a new mark is queued before all others.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        *,
        helm_release: str = "",
        cache: Cache,
        queue: KeyedQueue,
        writer: KubernetesWriter,
        metrics: OperatorMetrics,
        jitter: Callable[[float], float],
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._helm_release = helm_release
        self._cache = cache
        self._queue = queue
        self._writer = writer
        self._metrics = metrics
        self._jitter = jitter
        self._marks: dict[str, WakeMark] = {}
        self._has_gateway = False
        self._problem = ""
        self._absent = asyncio.Event()

    def of(self, uid: str) -> Wake:
        """Return what is known for the service with this UID."""
        return Wake(self._has_gateway and not self._problem, self._marks.get(uid))

    def reflector(self, client: KubernetesClient) -> Reflector:
        """Return the reflector that reads the marks."""
        fields = f"metadata.name={self._name}"
        return Reflector(
            client, CONFIG_MAP, self._namespace, self, self, fields=fields, jitter=self._jitter
        )

    async def keep(self) -> None:
        """Create the ConfigMap whenever it is absent; never return. Only the leader may call this.

        Raises:
            LeaseLost: this process must not write anymore.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            await self._absent.wait()
            self._absent.clear()  # before the request: the ConfigMap may be deleted again during it
            try:
                await self._writer.create(CONFIG_MAP, self._namespace, self._manifest())
            except ApiError as problem:
                self._absent.set()
                self._metrics.errors.labels(problem.reason).inc()
                log.warning("wake marks not created", name=self._name, error=str(problem))
            else:
                pause_s = FIRST_PAUSE_S
                log.info("wake marks created", name=self._name)
            await asyncio.sleep(self._jitter(pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _manifest(self) -> dict[str, Any]:
        """Return the empty ConfigMap. Helm refuses to upgrade over one that is not marked as its own."""
        metadata: dict[str, Any] = {"name": self._name}
        if self._helm_release:
            metadata["labels"] = {"app.kubernetes.io/managed-by": "Helm"}
            metadata["annotations"] = {
                "meta.helm.sh/release-name": self._helm_release,
                "meta.helm.sh/release-namespace": self._namespace,
            }
        return {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": metadata,
        }

    # -- the sink of the reflector ----------------------------------------------------------------

    def take(self, kind: str, live: Mapping[str, Any]) -> Place | None:
        """Store the content of the ConfigMap, which any client with the right may have written."""
        try:
            place = place_of(kind, live)
        except Unreadable:
            return None
        self._absent.clear()
        if why := text(live.get(UNREAD)):
            log.warning("wake marks unreadable", name=self._name, why=why)
            self._has_gateway = False
        else:
            self._put(as_map(live.get("data")))
        return place

    def gone(self, found: Place) -> None:
        """Forget the marks of a deleted ConfigMap: gateways write those that they need again."""
        del found
        self._put({})
        self._absent.set()

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> None:
        """Note that the ConfigMap is absent if the list does not contain it."""
        del kind, namespace, version
        if not names:
            self._put({})
            self._absent.set()

    def _put(self, data: Mapping[str, Any]) -> None:
        marks = {uid: mark for uid, value in data.items() if (mark := parse_mark(value))}
        new = {uid for uid, _ in marks.items() - self._marks.items()}
        may_sleep = GATEWAY_KEY in data and not self._has_gateway
        self._has_gateway = GATEWAY_KEY in data
        self._marks = marks
        self._metrics.wake_marks.set(len(marks))
        if not (new or may_sleep):
            return
        for key in self._cache.services():
            entry = self._cache.service(key)
            if entry is not None and entry.uid in new:
                self._queue.add(key)
            elif may_sleep:
                self._queue.add(key, Urgency.RESYNC)

    # -- the observer of the reflector ------------------------------------------------------------

    def failed(self, reflector: Reflector, problem: ApiError) -> None:
        """Keep the marks; the operator starts without them."""
        if problem.is_denial and str(problem) != self._problem:
            log.warning("wake marks cannot be read", name=self._name, error=str(problem))
        self._problem = str(problem)
        reflector.settled.set()

    def recovered(self, reflector: Reflector) -> None:
        """Note that the marks are read again."""
        del reflector
        self._problem = ""
