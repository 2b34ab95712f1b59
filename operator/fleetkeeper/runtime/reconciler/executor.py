"""Execution of a plan: children first, then the status, then events, which are posted later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeGuard

import structlog

from fleetkeeper.adapters.kubernetes.records import Seen, Unread, observe
from fleetkeeper.adapters.kubernetes.resources import CHILDREN, POD, resource_of
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.plan import Action, Apply, Delete, MarkPod, Plan
from fleetkeeper.reconcile.types import Child, Kind, WriteFailure, WriteProblem
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.reconciler.live_services import LiveServices
from fleetkeeper.runtime.reconciler.outcome import Outcome
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import Unreadable, as_map, maps, text

log = structlog.get_logger(__name__)

MAX_CONFIRMED_S: Final = 1.0
"""Time for which a read of the service allows the writes of a plan. Longer plans read it again."""


class Executor:
    """The executor of plans. It stores responses in the cache and remembers failures."""

    def __init__(
        self,
        client: KubernetesClient,
        writer: KubernetesWriter,
        cache: Cache,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], float],
        recorder: EventRecorder,
    ) -> None:
        self._client = client
        self._services = LiveServices(client, cache)
        self._writer = writer
        self._cache = cache
        self._metrics = metrics
        self._now = now
        self._recorder = recorder

    async def carry_out(
        self,
        key: Key,
        resource: Manifest,
        plan: Plan,
        failures: dict[tuple[str, str], WriteFailure],
    ) -> Outcome:
        """Execute the plan in its order, and update `failures`.

        After a refused write the other actions still run, but the status waits for a new plan that
        includes the refusal. If a name is already taken, nothing more is created: half a service
        would only occupy accelerators.

        Nothing is written for a service that the API server holds in another version than the planned
        one: the service is read before the children are written, and the status write is bound to
        the version. Each write of an existing child is bound to the version that was planned with. So
        a child whose owner the garbage collector removed during a deletion never gets it back.

        Raises:
            ApiError: the service could not be read.
            LeaseLost: this process must not write anymore.
        """
        outcome = Outcome(key, failures)
        first = next((item for item in plan.actions if _makes_pods(item)), None)
        for action in plan.actions:
            if not await self._is_confirmed(key, resource, outcome):
                return outcome
            if action is first:
                await self._check_service_names(key, resource, plan.actions, outcome)
            if _is_creation(action) and outcome.meets_conflict:
                continue
            await self._act(key, resource, action, outcome)
            if outcome.wait:
                return outcome
        if outcome.plan_again:
            return outcome
        if plan.status is not None:
            await self._write_status(key, resource, plan.status, outcome)
        if not outcome.stopped:
            for event in plan.events:
                self._recorder.record(key, event)
        return outcome

    async def _is_confirmed(self, key: Key, resource: Manifest, outcome: Outcome) -> bool:
        """Return whether the service may be written; if not, plan again with what was read."""
        if 0.0 <= self._now() - outcome.confirmed <= MAX_CONFIRMED_S:
            return True
        outcome.confirmed = self._now()
        if await self._services.is_unchanged(key, resource):
            return True
        outcome.plan_again = True
        return False

    async def _check_service_names(
        self, key: Key, resource: Manifest, actions: Sequence[Action], outcome: Outcome
    ) -> None:
        """Check that the names of Services, which come last, are free before pods take accelerators."""
        for action in actions:
            if _is_creation(action) and action.kind is Kind.SERVICE:
                try:
                    await self._is_taken(key, resource, action, outcome)
                except ApiError as problem:
                    self._refused(action, problem, outcome)

    async def _act(self, key: Key, resource: Manifest, action: Action, outcome: Outcome) -> None:
        try:
            if isinstance(action, Apply):
                done = await self._apply(key, resource, action, outcome)
            elif isinstance(action, Delete):
                done = await self._delete(key, action)
            else:
                done = await self._mark(key, action)
        except ApiError as problem:
            if problem.is_stale and isinstance(action, Apply):
                self._cache.drop_named(key, action.kind, action.name)
            self._refused(action, problem, outcome)
            return
        if done:
            outcome.succeeded(action)

    async def _apply(self, key: Key, resource: Manifest, action: Apply, outcome: Outcome) -> bool:
        if action.create_only:
            live = await self._create(key, resource, action, outcome)
            if live is None:
                return False
        else:
            live = await self._writer.apply_child(
                CHILDREN[action.kind],
                action.manifest,
                force=action.force,
                resource_version=action.resource_version,
            )
        self._record_answer(key, action, live)
        log.info(
            "applied", service=str(key), kind=action.kind.value, child=action.name, why=action.why
        )
        return True

    def _record_answer(self, key: Key, action: Apply, live: Manifest) -> None:
        """Store the response to an apply, so that a decision right after it sees the result."""
        found = self._observed(action.kind.value, live)
        if not isinstance(found, Seen):
            if found is not None:
                self._cache.put_unread(found)
            return
        if isinstance(found.record, Child) and found.record.digest != action.digest:
            self._metrics.digest_mismatches.labels(action.kind.value).inc()
            self._cache.accept_digest(found.record, action.digest)
            log.warning(
                "live object differs from the applied one",
                service=str(key),
                kind=action.kind.value,
                child=action.name,
                hint="an admission webhook changes a field that Fleetkeeper sets",
            )
        self._cache.put(found)

    def _observed(self, kind: str, live: Manifest) -> Seen | Unread | None:
        """Return the object in a response; None if it does not say which object it is."""
        try:
            return observe(kind, live)
        except Unreadable as problem:
            self._metrics.errors.labels("Unreadable").inc()
            log.warning(
                "response skipped: no readable name or namespace", kind=kind, why=str(problem)
            )
            return None

    async def _create(
        self, key: Key, resource: Manifest, action: Apply, outcome: Outcome
    ) -> Manifest | None:
        """Create an object and return it; None if the name is taken.

        Read a name that was found taken before trying it again, so that waiting for it writes nothing.
        """
        where = CHILDREN[action.kind]
        known = outcome.failures.get((action.kind.value, action.name))
        is_known = known is not None and known.problem is WriteProblem.CONFLICT
        if is_known and await self._is_taken(key, resource, action, outcome):
            return None
        try:
            return await self._writer.create_child(where, action.manifest)
        except ApiError as problem:
            if not problem.is_stale:
                raise
        if await self._is_taken(key, resource, action, outcome):
            return None
        # Deleted meanwhile, or a server that accepts no resourceVersion for an absent object.
        return await self._writer.apply_child(where, action.manifest, force=False)

    async def _is_taken(
        self, key: Key, resource: Manifest, action: Apply, outcome: Outcome
    ) -> bool:
        """Return whether an object has that name: plan again if it is ours, else record a conflict."""
        live = await self._client.read(CHILDREN[action.kind], key.namespace, action.name)
        if live is None:
            return False
        found = self._observed(action.kind.value, live)
        if not isinstance(found, Seen):
            unread = found or _unread(key, action)
            self._cache.put_named(key, unread)
            why = f"{action.kind} {action.name} already exists and cannot be read: {unread.why}"
            outcome.fail(action, WriteProblem.CONFLICT, why, self._now())
        elif isinstance(found.record, Child) and _is_ours(found.record, key, resource):
            self._cache.put_named(key, found.record)
            outcome.plan_again = True
        else:
            outcome.fail(action, WriteProblem.CONFLICT, _foreign(action, live), self._now())
        return True

    async def _delete(self, key: Key, action: Delete) -> bool:
        await self._writer.delete(
            resource_of(action.kind),
            key.namespace,
            action.name,
            uid=action.uid,
            resource_version=action.resource_version,
        )
        self._cache.deleting(key, action.kind, action.name)
        log.info("deleted", service=str(key), kind=action.kind, child=action.name, why=action.why)
        return True

    async def _mark(self, key: Key, action: MarkPod) -> bool:
        live = await self._writer.mark_pod(
            key.namespace, action.name, action.uid, action.deletion_cost
        )
        self._cache.take(POD.kind, live)
        return True

    def _refused(self, action: Action, problem: ApiError, outcome: Outcome) -> None:
        self._metrics.errors.labels(problem.reason).inc()
        outcome.refused(action, problem, self._now())

    async def _write_status(
        self, key: Key, resource: Manifest, status: Manifest, outcome: Outcome
    ) -> None:
        """Write the status of exactly the planned version; plan again if there is another by now."""
        meta = resource["metadata"]
        try:
            live = await self._writer.apply_status(
                key.namespace,
                key.name,
                status,
                uid=meta["uid"],
                resource_version=meta["resourceVersion"],
            )
        except ApiError as problem:
            self._metrics.errors.labels(problem.reason).inc()
            if await self._services.is_outdated(key, resource, problem):
                outcome.plan_again = True
                return
            outcome.wait = True
            outcome.retry_after_s = problem.retry_after_s or 0.0
            log.warning("status write failed", service=str(key), error=str(problem))
            return
        outcome.written += 1
        self._cache.put_service(live, by_us=True)


def _unread(key: Key, action: Apply) -> Unread:
    """Return the unreadable object under this name, if not even its own name can be read."""
    return Unread(
        action.kind.value,
        key.namespace,
        action.name,
        0,
        key.name,
        "metadata is not valid object metadata",
    )


def _is_creation(action: Action) -> TypeGuard[Apply]:
    return isinstance(action, Apply) and action.create_only


def _makes_pods(action: Action) -> bool:
    return _is_creation(action) and action.kind is Kind.DEPLOYMENT


def _is_ours(child: Child, key: Key, resource: Manifest) -> bool:
    if child.controller_uid is not None:
        return bool(child.controller_uid == resource["metadata"].get("uid"))
    return child.service == key.name


def _foreign(action: Apply, live: Manifest) -> str:
    meta = as_map(live.get("metadata"))
    owner = next(iter(maps(meta.get("ownerReferences"))), None)
    whose = f"; it belongs to {text(owner.get('kind'))} {text(owner.get('name'))}" if owner else ""
    label = text(as_map(meta.get("labels")).get(LABEL_SERVICE))
    whose = whose or (f"; it is labeled as part of service {label}" if label else "")
    return f"{action.kind} {action.name} already exists and is not part of this service{whose}"
