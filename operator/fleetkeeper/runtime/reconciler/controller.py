"""The reconcile loop: take a service, plan, and execute the plan until nothing is left to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from fleetkeeper.adapters.kubernetes.pod_records import event_record
from fleetkeeper.adapters.kubernetes.resources import EVENT, REPLICA_SET
from fleetkeeper.api.names import engine_name
from fleetkeeper.common.sleep import NO_WAKE
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.plan import Apply, Delete, Plan
from fleetkeeper.reconcile.planner import decide_plan
from fleetkeeper.reconcile.status.defect import plan_of_defect
from fleetkeeper.reconcile.status.gauges import gauges_of_service
from fleetkeeper.reconcile.types import Kind, ObjectEvent, Snapshot, WriteFailure
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key, KeyedQueue, Urgency
from fleetkeeper.runtime.reconciler.control_view import Control, NoControl
from fleetkeeper.runtime.reconciler.executor import Executor
from fleetkeeper.runtime.reconciler.outcome import Outcome
from fleetkeeper.runtime.reconciler.update_slot import UpdateSlot
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.state.wake_marks import WakeMarks
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import as_map, maps

log = structlog.get_logger(__name__)

PASSES: Final = 6
"""Plans in a row for one service before it is requeued behind others."""
EVENTS_KEPT_S: Final = 60.0
TEMPLATES_KEPT: Final = 10
"""Pod templates kept per service; that of a ReplicaSet never changes."""
EVENTS_READ: Final = 50
POD_TEMPLATE_HASH: Final = "pod-template-hash"


@dataclass(slots=True)
class _Memory:
    """The memory of a service between reconciles. It may be lost at any time."""

    uid: str
    failures: dict[tuple[str, str], WriteFailure] = field(default_factory=dict)
    templates: dict[str, Manifest] = field(default_factory=dict)
    events: dict[str, tuple[float, tuple[ObjectEvent, ...]]] = field(default_factory=dict)
    status_written: float | None = None
    children_written: float | None = None
    refusal_reported: float | None = None


class Controller:
    """The reconciler of the services that the queue hands out."""

    def __init__(
        self,
        *,
        queue: KeyedQueue,
        cache: Cache,
        client: KubernetesClient,
        executor: Executor,
        metrics: OperatorMetrics,
        defects: Defects,
        context: PlanContext,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        control: Control | None = None,
        ledger: GpuLedger,
        wake_marks: WakeMarks | None = None,
    ) -> None:
        self._queue = queue
        self._cache = cache
        self._client = client
        self._executor = executor
        self._metrics = metrics
        self._defects = defects
        self._context = context
        self._now = now
        self._monotonic = monotonic
        self._control: Control = control or NoControl()
        self._ledger = ledger
        self._wake_marks = wake_marks
        self._memory: dict[Key, _Memory] = {}
        self._update_slot = UpdateSlot(cache, defects)
        self.settled_since: float | None = None
        """When the caches became complete."""
        self.crd_missing: tuple[str, ...] = ()
        """Fields of our schema that the live CRD lacks."""
        self._count_grant_keys()

    def use_grant_keys(self, keys: str) -> None:
        """Reconcile every service with these public keys of the gateway (JWKS, JSON text)."""
        if keys == self._context.grant_keys:
            return
        self._context = replace(self._context, grant_keys=keys)
        self._count_grant_keys()
        for key in self._cache.services():
            self._queue.add(key, Urgency.RESYNC)

    def _count_grant_keys(self) -> None:
        keys = self._context.grant_keys
        self._metrics.grant_keys.set(len(json.loads(keys)["keys"]) if keys else 0)

    async def run(self, workers: int) -> None:
        """Reconcile at most `workers` services at a time until the queue is closed.

        Then wait for the reconciles in progress.

        Raises:
            ExceptionGroup: with LeaseLost, when this process must not write anymore.
        """
        slots = asyncio.Semaphore(workers)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                key = await self._queue.get()
                if key is None:
                    return
                group.create_task(self._reconcile_in_slot(key, slots), name=f"reconcile {key}")

    async def _reconcile_in_slot(self, key: Key, slots: asyncio.Semaphore) -> None:
        try:
            await self.reconcile(key)
        finally:
            self._queue.done(key)
            slots.release()

    async def reconcile(self, key: Key) -> None:
        """Reconcile a service once; requeue it on failure.

        Raises:
            LeaseLost: this process must not write anymore.
        """
        if self._cache.is_held(key):
            return  # requeued when its namespace can be read again
        began = self._monotonic()
        result = "failed"
        with self._defects.contained("reconcile", key) as step:
            try:
                result = await self._reconcile(key)
            except ApiError as problem:
                self._metrics.errors.labels(problem.reason).inc()
                log.warning("reconcile failed", service=str(key), error=str(problem))
                self._queue.retry(key)
        if step.failed:
            self._queue.retry(key)
            with self._defects.contained("status", key):
                await self._show_defect(key)
        self._metrics.reconciles.labels(result).inc()
        self._metrics.reconcile_seconds.observe(self._monotonic() - began)

    async def _show_defect(self, key: Key) -> None:
        """Write the defect into the status of a service whose plan fails."""
        self._update_slot.release(key)
        entry, defect = self._cache.service(key), self._defects.of(key)
        if entry is None or defect is None:
            return
        resource = entry.unpack()
        plan = plan_of_defect(resource, defect, self._now())
        await self._executor.carry_out(key, resource, plan, {})
        self._show(key, resource, plan)

    async def _reconcile(self, key: Key) -> str:
        """Reconcile a service; return the result: unchanged, written or failed."""
        written = 0
        asked: set[str] = set()
        for _ in range(PASSES):
            entry = self._cache.service(key)
            if entry is None:
                self._forget(key)
                return "unchanged"
            memory = self._memory_of(key, entry.uid)
            snapshot = self._snapshot(key, entry.unpack(), memory)
            plan = self._decide(snapshot)
            self._show(key, snapshot.resource, plan)
            if await self._read_what_is_wanted(key, plan, memory, asked):
                continue
            self._ledger.reserve(key, plan.actions)
            outcome = await self._executor.carry_out(key, snapshot.resource, plan, memory.failures)
            written += outcome.written
            self._report_refusal(key, memory)
            if plan.actions and outcome.written:
                memory.children_written = self._now()
            if plan.status is not None and not outcome.stopped:
                memory.status_written = self._now()
            if outcome.plan_again:
                continue
            return self._settle(key, plan, outcome, written)
        self._queue.retry(key)
        return "written" if written else "failed"

    def _show(self, key: Key, resource: Manifest, plan: Plan) -> None:
        """Set the gauges of a service to the status that the plan writes, or the present one."""
        status = as_map(resource.get("status")) if plan.status is None else plan.status
        held = self._cache.gpu_holding(key)
        self._metrics.states.show(
            key,
            gauges_of_service(as_map(resource.get("spec")), status, held.claimed + held.leaving),
        )

    def _settle(self, key: Key, plan: Plan, outcome: Outcome, written: int) -> str:
        if outcome.wait:
            delay_s = self._queue.retry(key)
            if outcome.retry_after_s > delay_s:
                self._queue.add_after(key, outcome.retry_after_s)
            return "failed"
        self._queue.succeeded(key)
        if plan.requeue_after_s is not None:
            self._queue.add_after(key, plan.requeue_after_s)
        if (left_s := self._defects.left_s(key)) is not None:
            self._queue.add_after(key, left_s)
        return "written" if written else "unchanged"

    def _report_refusal(self, key: Key, memory: _Memory) -> None:
        """Report each refused write of the engine Deployment once, for the control breaker."""
        failure = memory.failures.get((Kind.DEPLOYMENT.value, engine_name(key.name)))
        if failure is not None and failure.tried != memory.refusal_reported:
            memory.refusal_reported = failure.tried
            self._control.refused_replicas(key)

    def _snapshot(self, key: Key, resource: Manifest, memory: _Memory) -> Snapshot:
        view = self._control.view(key)
        fresh = self._now() - EVENTS_KEPT_S
        memory.events = {uid: kept for uid, kept in memory.events.items() if kept[0] >= fresh}
        return Snapshot(
            resource=resource,
            children=self._cache.children(key),
            revisions=self._cache.revisions(key),
            pods=self._cache.pods(key),
            failures=tuple(memory.failures.values()),
            templates=dict(memory.templates),
            events=tuple(event for _, events in memory.events.values() for event in events),
            foreign_replica_writes=self._cache.foreign_replica_writes(key),
            settled_since=self.settled_since,
            status_written=memory.status_written,
            children_written=memory.children_written,
            gpu_allowance=self._ledger.allowance(key),
            allocation=view.allocation,
            control_report=view.control_report,
            control_pending=view.is_pending,
            pod_load=view.pod_load,
            starts=view.starts,
            idle=view.idle,
            wake=self._wake_marks.of(memory.uid) if self._wake_marks else NO_WAKE,
            unreadable=self._cache.unreadable(key),
            crd_missing=self.crd_missing,
            may_update_engine=self._update_slot.is_held_by(key, resource),
            defect=self._defects.of(key),
        )

    def _decide(self, snapshot: Snapshot) -> Plan:
        began = self._monotonic()
        plan = decide_plan(snapshot, self._context, self._now())
        self._metrics.decision_seconds.observe(self._monotonic() - began)
        for action in plan.actions:
            self._metrics.decisions.labels(_action_name(action)).inc()
        if plan.status is not None:
            self._metrics.decisions.labels("status").inc()
        if plan.events:
            self._metrics.decisions.labels("event").inc(len(plan.events))
        return plan

    async def _read_what_is_wanted(
        self, key: Key, plan: Plan, memory: _Memory, asked: set[str]
    ) -> bool:
        """Read the templates and events that the plan asks for; return whether any was read.

        Each is read at most once per reconcile.
        """
        templates = [
            name
            for name in plan.wants_templates
            if name not in memory.templates and name not in asked
        ]
        events = [uid for uid in plan.wants_events if uid not in memory.events and uid not in asked]
        asked.update(templates, events)
        for name in templates:
            await self._read_template(key, name, memory)
        for uid in events:
            await self._read_events(key, uid, memory)
        return bool(templates or events)

    async def _read_template(self, key: Key, name: str, memory: _Memory) -> None:
        live = await self._client.read(REPLICA_SET, key.namespace, name)
        if live is None:
            return
        template = as_map(as_map(live.get("spec")).get("template"))
        if not template:
            log.warning("ReplicaSet has no pod template", service=str(key), replicaset=name)
            return
        meta = as_map(template.get("metadata"))
        labels = {k: v for k, v in as_map(meta.get("labels")).items() if k != POD_TEMPLATE_HASH}
        template = {**template, "metadata": {**meta, "labels": labels}}
        while len(memory.templates) >= TEMPLATES_KEPT:
            memory.templates.pop(next(iter(memory.templates)))
        memory.templates[name] = template

    async def _read_events(self, key: Key, uid: str, memory: _Memory) -> None:
        pages = self._client.list_pages(
            EVENT,
            key.namespace,
            field_selector=f"involvedObject.uid={uid},type=Warning",
            page_size=EVENTS_READ,
        )
        found: list[ObjectEvent] = []
        async for page in pages:
            found += [event_record(item) for item in maps(page.get("items"))]
            if len(found) >= EVENTS_READ:
                break
        memory.events[uid] = (self._now(), tuple(found))

    def _memory_of(self, key: Key, uid: str) -> _Memory:
        memory = self._memory.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memory[key] = _Memory(uid)
        return memory

    def _forget(self, key: Key) -> None:
        self._memory.pop(key, None)
        self._metrics.states.forget(key)
        self._queue.forget(key)
        self._control.forget(key)
        self._ledger.forget(key)
        self._defects.forget(key)
        self._update_slot.release(key)


def _action_name(action: object) -> str:
    if isinstance(action, Apply):
        return "create" if action.create_only else "apply"
    return "delete" if isinstance(action, Delete) else "mark_pod"
