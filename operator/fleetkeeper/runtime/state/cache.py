"""Lean records of the cluster's objects by service, the newest version of each.

Three sources write here: watches, lists, and the responses to our own writes, so a decision right
after a write sees its result. They arrive in any order; the greater resourceVersion wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import structlog

from fleetkeeper.adapters.kubernetes.records import Seen, Unread, observe
from fleetkeeper.api.names import KIND
from fleetkeeper.common.budget import Holding
from fleetkeeper.reconcile.types import Child, Kind, Pod, Revision, UnreadableObject
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.changes import differs, was_edited
from fleetkeeper.runtime.state.gpu_shares import count_gpus, share_of
from fleetkeeper.runtime.state.members import Members
from fleetkeeper.runtime.state.named import NamedObjects
from fleetkeeper.runtime.state.service_entry import ServiceEntry, pack_service
from fleetkeeper.runtime.state.tombstones import Tombstones
from fleetkeeper.runtime.state.unread import UnreadObjects
from fleetkeeper_kube.reading import Place, Unreadable, place_of

log = structlog.get_logger(__name__)

Changed = Callable[[Key], None]


class Cache:
    """Records by service.

    `changed` is called with a service to reconcile now. `on_status_change` is called with a service to
    reconcile soon: the status of its objects changed, and is likely to change again.
    """

    def __init__(
        self, *, now: Callable[[], float], changed: Changed, on_status_change: Changed | None = None
    ) -> None:
        self._now = now
        self._changed = changed
        self._on_status_change = on_status_change or changed
        self._services: dict[Key, ServiceEntry] = {}
        self._members: dict[Key, Members] = {}
        self._home: dict[tuple[str, str, str], Key] = {}
        self._named = NamedObjects(now)
        self._same: dict[str, tuple[str, str]] = {}
        self._gone = Tombstones()
        self._held: set[str] = set()
        self.gpu_version = 0
        """Incremented whenever `gpu_holdings` may have changed."""
        self._unread = UnreadObjects(self._services.keys)

    # -- services ---------------------------------------------------------------------------------

    def put_service(self, live: Mapping[str, Any], *, by_us: bool = False) -> None:
        """Store a service; `by_us` if it is the response to our own status write."""
        try:
            place = place_of(KIND, live)
        except Unreadable as problem:
            log.warning("service skipped: no readable name or namespace", why=str(problem))
            return
        key = Key(place.namespace, place.name)
        entry = self._services.get(key)
        if entry is not None and entry.version >= place.version:
            return
        if self._gone.covers((KIND, key.namespace, key.name), place.version):
            return
        found = pack_service(live)
        if entry is None or entry.uid != found.uid:
            self.gpu_version += 1
        self._services[key] = found
        if found.unread and (entry is None or entry.unread != found.unread):
            log.warning("service unreadable", service=str(key), why=found.unread)
        if by_us:
            self._on_status_change(key)
        else:
            self._changed(key)

    def drop_service(self, key: Key, *, uid: str = "", version: int | None = None) -> None:
        """Remove a deleted service; if given, only the one with this `uid`, up to this `version`."""
        entry = self._services.get(key)
        if entry is None or (uid and entry.uid != uid):
            return
        if version is not None and entry.version > version:
            return
        del self._services[key]
        self.gpu_version += 1
        self._named.forget(key)
        self._gone.bury((KIND, key.namespace, key.name), max(entry.version, version or 0))
        self._changed(key)

    def listed_services(
        self, namespace: str | None, found: Collection[Key], version: int
    ) -> list[Key]:
        """Remove and return the services that a finished list as of `version` did not contain."""
        ghosts = [
            key
            for key, entry in self._services.items()
            if (namespace is None or key.namespace == namespace)
            and key not in found
            and entry.version <= version
        ]
        for key in ghosts:
            self.drop_service(key)
        return ghosts

    def hold(self, namespace: str) -> None:
        """Suspend decisions on a namespace: its records may be out of date from now on."""
        self._held.add(namespace)

    def resume(self, namespace: str) -> None:
        """Resume decisions on a namespace whose records are complete again; queue its services."""
        self._held.discard(namespace)
        for key in self.services():
            if key.namespace == namespace:
                self._changed(key)

    def is_held(self, key: Key) -> bool:
        """Return whether the service's namespace cannot be read now."""
        return key.namespace in self._held

    def service(self, key: Key) -> ServiceEntry | None:
        """Return the entry of a service, or None."""
        return self._services.get(key)

    def services(self) -> Iterable[Key]:
        """Return the keys of all services."""
        return tuple(self._services)

    def __len__(self) -> int:
        """Return the number of services."""
        return len(self._services)

    @property
    def records(self) -> int:
        """The number of children, ReplicaSets and pods in the cache."""
        return len(self._home)

    # -- objects of services -----------------------------------------------------------------------

    def known(self, kind: str, namespace: str, name: str) -> Seen | None:
        """Return the cached state of an object, or None."""
        home = self._home.get((kind, namespace, name))
        return self._members[home].by_name[kind, name] if home else None

    def take(self, kind: str, live: Mapping[str, Any]) -> Place | None:
        """Store an object from any writer; as unreadable if it cannot be read.

        Return the object's place, or None if not even its name can be read.
        """
        try:
            place = place_of(kind, live)
        except Unreadable as problem:
            log.warning(
                "object skipped: no readable name or namespace", kind=kind, why=str(problem)
            )
            return None
        before = self.known(kind, place.namespace, place.name)
        if before is not None and before.version >= place.version:
            return place
        found = observe(kind, live, before)
        if isinstance(found, Seen):
            self.put(found)
        else:
            self.put_unread(found)
        return place

    def put_unread(self, found: Unread) -> None:
        """Store that an object exists but cannot be read. Its last readable state stays."""
        address = (found.kind, found.namespace, found.name)
        if self._gone.covers(address, found.version):
            return
        before = self.known(*address)
        if before is not None and before.version >= found.version:
            return
        if key := self._unread.put(found, self._home.get(address)):
            self._changed(key)

    def put(self, found: Seen) -> None:
        """Store an object, and queue its service if a decision could change.

        The service is queued at once if a field that we set was edited. Otherwise it is queued a
        moment later, because a starting Deployment changes a dozen times in a row.
        """
        address = (found.kind, found.namespace, found.name)
        if self._gone.covers(address, found.version):
            return
        home = self._home.get(address)
        key = Key(found.namespace, found.service) if found.service else None
        before = self.known(*address)
        if before is not None and before.version >= found.version:
            return
        if readable := self._unread.drop(address, found.version):
            self._changed(readable)
        if home is not None and home != key:
            self._remove(address, home)
        if key is None:
            return
        members = self._members.setdefault(key, Members())
        members.by_name[found.kind, found.name] = found
        if share_of(before.record if before else None) != share_of(found.record):
            self._recount_gpus(members)
        self._home[address] = key
        if before is not None:
            members.note_replicas(before, found, self._now())
        if before is not None and was_edited(before, found):
            self._changed(key)
        elif before is None or home != key or differs(before, found):
            self._on_status_change(key)

    def gone(self, found: Place) -> None:
        """Remove an object that was deleted or lost our label."""
        address = (found.kind, found.namespace, found.name)
        if readable := self._unread.drop(address, found.version):
            self._changed(readable)
        home = self._home.get(address)
        if home is None:
            self._gone.bury(address, found.version)
            return
        if self._members[home].by_name[address[0], address[2]].version > found.version:
            return
        self._gone.bury(address, found.version)
        self._remove(address, home)

    def listed(
        self, kind: str, namespace: str | None, names: frozenset[tuple[str, str]], version: int
    ) -> None:
        """Drop objects missing from a completed list, except those newer than the list."""
        for key in self._unread.absent(kind, namespace, names, version):
            self._changed(key)
        for address, home in list(self._home.items()):
            if address[0] != kind or (namespace is not None and address[1] != namespace):
                continue
            if address[1:] in names:
                continue
            if self._members[home].by_name[address[0], address[2]].version <= version:
                self._remove(address, home)

    def put_named(self, key: Key, child: Child | Unread) -> None:
        """Store an object that was read by name and that no watch shows, for `NAMED_S`."""
        self._named.put(key, child)
        self._changed(key)

    def drop_named(self, key: Key, kind: Kind, name: str) -> None:
        """Remove an object that was read by name and changed since; no watch would show that."""
        self._named.drop(key, kind, name)

    def deleting(self, key: Key, kind: str, name: str) -> None:
        """Mark an object that we deleted as being deleted until a watch confirms it."""
        members = self._members.get(key)
        found = members.by_name.get((kind, name)) if members else None
        if members is not None and found is not None and isinstance(found.record, Child | Pod):
            record = replace(found.record, deleting=True)
            members.by_name[kind, name] = replace(found, record=record)
            self._recount_gpus(members)

    def accept_digest(self, live: Child, asked: str) -> None:
        """Treat the digest of `live` as equal to `asked` from now on: the server stores it so.

        Without this, the operator would fight forever against a webhook that rewrites a field.
        """
        self._same[live.uid] = (live.digest, asked)

    # -- views ------------------------------------------------------------------------------------

    def children(self, key: Key) -> dict[tuple[Kind, str], Child]:
        """Return the watched children, and those read by name within `NAMED_S`."""
        found = {
            (child.kind, child.name): child
            for child in self._named.fresh(key)
            if isinstance(child, Child)
        }
        for record in self._records(key):
            if isinstance(record, Child):
                found[record.kind, record.name] = self._as_asked(record)
        return found

    def unreadable(self, key: Key) -> tuple[UnreadableObject, ...]:
        """Return the unreadable objects of a service; the service itself can be one of them."""
        entry = self._services.get(key)
        of_itself = (
            [UnreadableObject(KIND, key.name, entry.unread)] if entry and entry.unread else []
        )
        named = [found for found in self._named.fresh(key) if isinstance(found, Unread)]
        others = [
            UnreadableObject(found.kind, found.name, found.why)
            for found in (*self._unread.of(key), *named)
        ]
        return tuple(dict.fromkeys((*of_itself, *others)))

    def unreadable_counts(self) -> Counter[str]:
        """Return the number of unreadable objects by kind."""
        counts = self._unread.counts()
        counts[KIND] = sum(bool(entry.unread) for entry in self._services.values())
        return counts

    def _as_asked(self, child: Child) -> Child:
        same = self._same.get(child.uid) if self._same else None
        if same is not None and same[0] == child.digest:
            return replace(child, digest=same[1])
        return child

    def revisions(self, key: Key) -> tuple[Revision, ...]:
        """Return the ReplicaSets of a service, oldest first."""
        found = [record for record in self._records(key) if isinstance(record, Revision)]
        return tuple(sorted(found, key=lambda revision: (revision.created, revision.name)))

    def pods(self, key: Key) -> tuple[Pod, ...]:
        """Return the pods of a service, sorted by name."""
        found = [record for record in self._records(key) if isinstance(record, Pod)]
        return tuple(sorted(found, key=lambda pod: pod.name))

    def gpu_holdings(self) -> Iterator[tuple[Key, Holding]]:
        """Yield the accelerators of every service with objects left, even if it is deleted itself."""
        for key in self._members:
            yield key, self.gpu_holding(key)

    def gpu_holding(self, key: Key) -> Holding:
        """Return the accelerators of one service."""
        members = self._members.get(key)
        if members is None:
            return Holding()
        if members.gpus is None:
            members.gpus = count_gpus(key.name, self._records(key))
        entry = self._services.get(key)
        return members.gpus.holding(entry.uid if entry is not None else None)

    def version(self, key: Key, kind: str, name: str) -> int | None:
        """Return the resourceVersion of a cached object, or None."""
        members = self._members.get(key)
        found = members.by_name.get((kind, name)) if members is not None else None
        return found.version if found is not None else None

    def foreign_replica_writes(self, key: Key) -> tuple[tuple[float, str], ...]:
        """Return the changes by others to the engine Deployment's replicas in the last 10 minutes."""
        members = self._members.get(key)
        return members.foreign_replica_writes(self._now()) if members is not None else ()

    # -- internals --------------------------------------------------------------------------------

    def _records(self, key: Key) -> Iterator[Child | Revision | Pod]:
        members = self._members.get(key)
        return iter(()) if members is None else members.records()

    def _recount_gpus(self, members: Members) -> None:
        members.gpus = None
        self.gpu_version += 1

    def _remove(self, address: tuple[str, str, str], home: Key) -> None:
        members = self._members[home]
        found = members.by_name.pop((address[0], address[2]))
        self._recount_gpus(members)
        self._same.pop(found.record.uid, None)
        del self._home[address]
        if not members.by_name:
            del self._members[home]
        self._changed(home)
