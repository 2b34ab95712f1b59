"""What a snapshot shows of a service's workloads, counted once for all decisions."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api import names
from fleetkeeper.plan.model import Kind, Pod, Revision, Snapshot, Workload

GONE_PHASES = frozenset({"Failed", "Succeeded"})
"""An evicted pod stays as an object for hours; it is no replica any more."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The engines and the router of one service, as the caches hold them.

    `engine_pods` and `router_pods` leave out pods that are being deleted or have ended.
    `current` is the revision of the live template, None until Kubernetes has made it.
    """

    engine: Workload | None
    router: Workload | None
    revisions: tuple[Revision, ...]
    current: Revision | None
    engine_pods: tuple[Pod, ...]
    router_pods: tuple[Pod, ...]

    @property
    def ready_replicas(self) -> int:
        """Ready engine pods of any revision."""
        return sum(pod.ready for pod in self.engine_pods)

    @property
    def ready_routers(self) -> int:
        """Ready router pods."""
        return sum(pod.ready for pod in self.router_pods)

    @property
    def live_replicas(self) -> int | None:
        """The live `spec.replicas` of the engine Deployment, None while there is none."""
        return self.engine.desired_replicas if self.engine else None

    def pods_of(self, revision: Revision | None) -> tuple[Pod, ...]:
        """The engine pods of one revision."""
        if revision is None:
            return ()
        return tuple(pod for pod in self.engine_pods if pod.revision_uid == revision.uid)

    @property
    def updated_replicas(self) -> int:
        """Engine pods of the live template."""
        return len(self.pods_of(self.current))

    def revision_with(self, template_hash: str) -> Revision | None:
        """The newest revision whose pods carry this template hash."""
        found = [item for item in self.revisions if item.template_hash == template_hash]
        return found[0] if found else None


def holds_accelerators(pod: Pod) -> bool:
    """Return whether a pod has its accelerators: it is on a node and has not ended."""
    return pod.scheduled and pod.phase not in GONE_PHASES


def facts_of(snapshot: Snapshot, service: str) -> Facts:
    """The facts of the service of this name."""
    engine = _workload(snapshot, names.engine_name(service))
    revisions = _revisions(snapshot, engine)
    newest = revisions[0] if revisions else None
    is_current = newest and engine and newest.template_hash == engine.template_hash
    return Facts(
        engine=engine,
        router=_workload(snapshot, names.router_name(service)),
        revisions=revisions,
        current=newest if is_current else None,
        engine_pods=_pods(snapshot, names.Component.ENGINE),
        router_pods=_pods(snapshot, names.Component.ROUTER),
    )


def _workload(snapshot: Snapshot, name: str) -> Workload | None:
    child = snapshot.children.get((Kind.DEPLOYMENT, name))
    return child if isinstance(child, Workload) else None


def _revisions(snapshot: Snapshot, engine: Workload | None) -> tuple[Revision, ...]:
    """Those of the engine Deployment, newest first."""
    own = [item for item in snapshot.revisions if engine and item.deployment_uid == engine.uid]
    return tuple(sorted(own, key=lambda item: (-item.number, item.name)))


def _pods(snapshot: Snapshot, component: names.Component) -> tuple[Pod, ...]:
    """Living pods of a component, oldest first."""
    living = (
        pod
        for pod in snapshot.pods
        if pod.component == component and not pod.deleting and pod.phase not in GONE_PHASES
    )
    return tuple(sorted(living, key=lambda pod: (pod.created, pod.name)))
