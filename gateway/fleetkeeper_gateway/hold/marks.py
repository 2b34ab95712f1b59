"""The wake marks that this gateway writes into one ConfigMap, which the operator watches.

One mark wakes a service: nothing is written while it stands, or while a service is awake. Every gateway
writes single keys by merge patches, so that none undoes the marks of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from fleetkeeper_contract.sleep import (
    GATEWAY_KEY,
    GATEWAY_VALUE,
    MAX_MARKS,
    WakeMark,
    format_mark,
    parse_mark,
)
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.hold import metrics
from fleetkeeper_gateway.interfaces import Service, Services
from fleetkeeper_gateway.kubernetes.watch import USER_AGENT, ObjectName, Watch
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import Credentials
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import as_map
from fleetkeeper_kube.reflector import jittered
from fleetkeeper_kube.resource import Resource

log = structlog.get_logger(__name__)

CONFIG_MAPS: Final = Resource("ConfigMap", "configmaps", "v1")
MERGE_PATCH: Final = "application/merge-patch+json"
COLLECT_S: Final = 1.0
"""Time after a write in which further marks are collected for the next one."""
REPEAT_S: Final = 2.0
"""Time after the write of a mark before it is written again. The watch shows a write sooner."""
SYNC_PERIOD_S: Final = 0.25
FIRST_PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 5.0

Patch = dict[str, str | None]


class WakeMarks:
    """The watch of the ConfigMap, and the writes to it."""

    def __init__(
        self,
        place: ObjectName,
        services: Services,
        credentials: Credentials,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; `run` watches and writes."""
        self._place = place
        self._services = services
        self._monotonic = monotonic
        self._client = KubernetesClient(credentials, user_agent=USER_AGENT)
        namespace, name = place
        self.watch = Watch(
            self._client,
            CONFIG_MAPS,
            self,
            namespaces=(namespace,),
            fields=f"metadata.name={name}",
        )
        self._data: Mapping[str, Any] | None = None
        """The content of the watched object; None while it is absent or unknown."""
        self._wanted: dict[str, tuple[Service, WakeMark]] = {}
        self._written: dict[str, tuple[str, float]] = {}
        """The value that was written to a key last, and when. Entries older than `REPEAT_S` mean nothing."""
        self._changed = asyncio.Event()
        self._problem = ""

    def want(self, service: Service, tier: Tier) -> None:
        """Ask for the mark of a service that sleeps, unless the same or a more urgent one stands.

        Requests that wait ask repeatedly, so a mark that was deleted is written again.
        """
        sleep = service.sleep
        if sleep is None or not sleep.ends_by_mark:
            return
        mark = WakeMark(sleep.number, tier)
        wanted = self._wanted.get(service.uid)
        if not _covers(wanted and wanted[1], mark) and not self._stands(service.uid, mark):
            self._wanted[service.uid] = service, mark
            self._changed.set()

    async def run(self) -> None:
        """Watch and write until cancelled."""
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watch.run())
            tasks.create_task(self._write())

    # -- the watched object -------------------------------------------------------------------------

    def put(self, place: ObjectName, found: Mapping[str, Any]) -> None:
        """Store the object's content, which any client with the right may have written."""
        if place == self._place:
            self._data = as_map(found.get("data"))
            self._changed.set()

    def remove(self, place: ObjectName) -> None:
        """Forget the content. The operator creates the object again."""
        if place == self._place:
            self._data = None

    def listed(self) -> None:
        """Do nothing: the content is complete without it."""

    # -- writes -------------------------------------------------------------------------------------

    async def _write(self) -> None:
        while not self._services.synced:  # noqa: ASYNC110 - the services have no event for it
            await asyncio.sleep(SYNC_PERIOD_S)
        pause_s = FIRST_PAUSE_S
        while True:
            patch = self._patch()
            if patch is None:
                await self._until_changed()
                continue
            wanted = dict(self._wanted)
            try:
                await self._send(patch)
            except ApiError as problem:
                self._failed(problem)
                await asyncio.sleep(jittered(pause_s))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            self._succeeded(patch, wanted)
            pause_s = FIRST_PAUSE_S
            await asyncio.sleep(COLLECT_S)

    async def _until_changed(self) -> None:
        """Wait for a wanted mark or a change of the object.

        A key that was written, but is absent again, is due later without an event.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPEAT_S if self._written else None):
                await self._changed.wait()
        self._changed.clear()

    async def _send(self, patch: Patch) -> None:
        await self._client.request(
            "PATCH",
            CONFIG_MAPS.path(*self._place),
            body={"data": patch},
            content_type=MERGE_PATCH,
        )

    def _failed(self, problem: ApiError) -> None:
        metrics.FAILURES.inc()
        if self._problem != problem.reason:
            self._problem = problem.reason
            log.warning("wake marks cannot be written; retrying", error=str(problem))

    def _succeeded(self, patch: Patch, wanted: Mapping[str, tuple[Service, WakeMark]]) -> None:
        now = self._monotonic()
        for key, value in patch.items():
            if value is not None:
                self._written[key] = value, now
        metrics.MARKS.inc(sum(uid in patch for uid in wanted))
        for uid in wanted.keys() & patch.keys():
            if self._wanted.get(uid) is wanted[uid]:
                del self._wanted[uid]
        if self._problem:
            self._problem = ""
            log.info("wake marks are written again")

    def _patch(self) -> Patch | None:
        """Return the entries to write, and None for those to remove; None if there is nothing to write."""
        now = self._monotonic()
        self._written = {
            key: entry for key, entry in self._written.items() if now - entry[1] < REPEAT_S
        }
        self._wanted = {uid: entry for uid, entry in self._wanted.items() if self._is_due(*entry)}
        patch: Patch = {uid: format_mark(mark) for uid, (_, mark) in self._wanted.items()}
        data = self._data or {}
        is_unknown = self._data is None or GATEWAY_KEY in self._written
        if not is_unknown and data.get(GATEWAY_KEY) != GATEWAY_VALUE:
            patch[GATEWAY_KEY] = GATEWAY_VALUE
        if not patch:
            return None
        known = {service.uid: service for service in self._services.all()}
        gone = [uid for uid in data if uid not in patch and _is_gone(uid, data[uid], known)]
        return self._within_bounds({**dict.fromkeys(gone), **patch}, known)

    def _within_bounds(self, patch: Patch, known: Mapping[str, Service]) -> Patch | None:
        """Return a patch after which there are at most `MAX_MARKS` marks.

        The first marks to go are those of services that are awake, then the least urgent wanted ones.
        """
        kept = [uid for uid in self._data or {} if uid not in patch and uid != GATEWAY_KEY]
        new = sorted(self._wanted, key=lambda uid: self._wanted[uid][1].tier)
        over = len(kept) + len(new) - MAX_MARKS
        if over <= 0:
            return patch
        awake = [uid for uid in kept if uid in known and known[uid].sleep is None][:over]
        dropped = new[len(new) - (over - len(awake)) :]
        patch = {**patch, **dict.fromkeys(awake)}
        patch = {key: value for key, value in patch.items() if key not in dropped}
        return patch or None

    def _is_due(self, service: Service, mark: WakeMark) -> bool:
        """Return whether the sleep that a wanted mark is to end still lasts."""
        now = self._services.named(service.namespace, service.name)
        return (
            now is not None
            and now.uid == service.uid
            and now.sleep is not None
            and now.sleep.number == mark.number
            and now.sleep.ends_by_mark
        )

    def _stands(self, uid: str, mark: WakeMark) -> bool:
        """Return whether a mark is in the object, or was written so lately that the watch may not show it."""
        if self._data is not None and _covers(parse_mark(self._data.get(uid)), mark):
            return True
        value, at = self._written.get(uid, ("", 0.0))
        return self._monotonic() - at < REPEAT_S and _covers(parse_mark(value), mark)


def _covers(found: WakeMark | None, mark: WakeMark) -> bool:
    return found is not None and found.number == mark.number and found.tier <= mark.tier


def _is_gone(uid: str, value: object, known: Mapping[str, Service]) -> bool:
    """Return whether a mark means nothing anymore: its service is gone, or it is of an earlier sleep."""
    if uid == GATEWAY_KEY:
        return False
    if uid not in known:
        return True
    sleep, mark = known[uid].sleep, parse_mark(value)
    return sleep is not None and (mark is None or mark.number < sleep.number)
