"""Construction of the operator's parts from the settings."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.adapters.clock import SystemClock
from fleetkeeper.adapters.kubernetes.lease import LeaderLease, LeaseTerms
from fleetkeeper.adapters.kubernetes.reflector import watch_managed
from fleetkeeper.adapters.kubernetes.resources import WATCHED
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter, Write, WriteHook, WritePoint
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.runtime.autoscaler.setup import ControlParts, build_control
from fleetkeeper.runtime.crd import CrdCheck
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.event_recorder import EventRecorder
from fleetkeeper.runtime.grant_keys import GrantKeysFile
from fleetkeeper.runtime.namespaces import NamespaceReads
from fleetkeeper.runtime.queue import Key, KeyedQueue, Urgency
from fleetkeeper.runtime.reconciler.controller import Controller
from fleetkeeper.runtime.reconciler.executor import Executor
from fleetkeeper.runtime.reconciler.live_services import LiveServices
from fleetkeeper.runtime.resync import Resync
from fleetkeeper.runtime.settings import Settings
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.state.wake_marks import WakeMarks
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.reflector import Reflector


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one operator process, connected."""

    settings: Settings
    client: KubernetesClient
    clock: SystemClock
    metrics: OperatorMetrics
    queue: KeyedQueue
    cache: Cache
    defects: Defects
    lease: LeaderLease
    writer: KubernetesWriter
    recorder: EventRecorder
    control: ControlParts | None
    controller: Controller
    grant_keys: GrantKeysFile
    wake_marks: WakeMarks | None
    crd: CrdCheck
    reads: NamespaceReads
    resync: Resync
    reflectors: list[Reflector]


def build_parts(
    settings: Settings,
    context: PlanContext,
    client: KubernetesClient,
    *,
    lease_client: KubernetesClient,
    hook: WriteHook,
) -> Parts:
    """Return the parts of an operator with these settings. Nothing runs yet.

    Raises:
        SettingsError: the control key cannot be used.
    """
    clock = SystemClock()
    client.on_date = clock.observe_date
    metrics = OperatorMetrics()
    queue = KeyedQueue(monotonic=clock.monotonic, jitter=clock.jitter)

    def changed(key: Key) -> None:
        """Queue a service; those read at start-up come after those that change now."""
        is_settled = controller.settled_since is not None
        queue.add(key, Urgency.CHANGED if is_settled else Urgency.RESYNC)

    def status_changed(key: Key) -> None:
        if controller.settled_since is None:
            queue.add(key, Urgency.RESYNC)
        else:
            queue.add_soon(key)

    cache = Cache(now=clock.now, changed=changed, on_status_change=status_changed)
    defects = Defects(metrics.defects, monotonic=clock.monotonic, changed=queue.add)
    ledger = GpuLedger(cache, context.gpu_budget)
    identity = settings.process_identity
    lease = _lease(settings, identity, lease_client, clock, metrics)
    writer = KubernetesWriter(
        client,
        fence=lease.check if settings.leader.enabled else _no_fence,
        hook=_counted(hook, metrics),
    )
    recorder = EventRecorder(
        writer,
        cache,
        metrics,
        now=clock.now,
        instance=identity,
        defects=defects,
        lease=Key(settings.operator_namespace, settings.leader.lease_name),
    )
    control = (
        build_control(
            settings,
            context,
            cache=cache,
            queue=queue,
            writer=writer,
            is_unchanged=LiveServices(client, cache).is_unchanged,
            lease=lease,
            recorder=recorder,
            metrics=metrics,
            defects=defects,
            clock=clock,
            ledger=ledger,
        )
        if settings.control_enabled
        else None
    )
    wake_marks = (
        WakeMarks(
            settings.operator_namespace,
            settings.wake_marks,
            helm_release=settings.helm_release,
            cache=cache,
            queue=queue,
            writer=writer,
            metrics=metrics,
            jitter=clock.jitter,
        )
        if settings.wake_marks
        else None
    )
    controller = Controller(
        queue=queue,
        cache=cache,
        client=client,
        executor=Executor(client, writer, cache, metrics, now=clock.now, recorder=recorder),
        metrics=metrics,
        defects=defects,
        context=context,
        now=clock.now,
        monotonic=clock.monotonic,
        control=control.loop if control is not None else None,
        ledger=ledger,
        wake_marks=wake_marks,
    )
    crd = CrdCheck(client, controller)
    namespaces: tuple[str | None, ...] = settings.namespaces or (None,)

    def recovered() -> None:
        """Queue a resync for a namespace that can be read again: only a list shows deletions."""
        resync.want()

    reads = NamespaceReads(settings.namespaces, cache, metrics, recovered=recovered)
    resync = Resync(
        client,
        cache,
        queue,
        metrics,
        clock,
        defects=defects,
        namespaces=namespaces,
        reads=reads,
        period_s=settings.resync_s,
        page_size=settings.list_page_size,
        also=crd.observe,
    )
    reflectors = [
        watch_managed(
            client, resource, namespace, cache, reads.report_of(namespace, resource.plural)
        )
        for namespace in namespaces
        for resource in WATCHED
    ]
    if wake_marks is not None:
        reflectors.append(wake_marks.reflector(client))
    return Parts(
        settings=settings,
        client=client,
        clock=clock,
        metrics=metrics,
        queue=queue,
        cache=cache,
        defects=defects,
        lease=lease,
        writer=writer,
        recorder=recorder,
        control=control,
        controller=controller,
        grant_keys=GrantKeysFile(settings.grant_jwks_file, controller.use_grant_keys),
        wake_marks=wake_marks,
        crd=crd,
        reads=reads,
        resync=resync,
        reflectors=reflectors,
    )


def _lease(
    settings: Settings,
    identity: str,
    client: KubernetesClient,
    clock: SystemClock,
    metrics: OperatorMetrics,
) -> LeaderLease:
    terms = LeaseTerms(
        namespace=settings.operator_namespace,
        name=settings.leader.lease_name,
        identity=identity,
        duration_s=settings.leader.duration_s,
        renew_deadline_s=settings.leader.renew_deadline_s,
        retry_s=settings.leader.retry_s,
    )
    return LeaderLease(client, terms, clock, on_write=metrics.writes.labels("update", "Lease").inc)


def _counted(hook: WriteHook, metrics: OperatorMetrics) -> WriteHook:
    def count(point: WritePoint, write: Write) -> None:
        if point is WritePoint.BEFORE:
            metrics.writes.labels(write.verb, write.kind).inc()
        hook(point, write)

    return count


def _no_fence() -> None:
    """Allow every write: without leader election this is the only process."""
