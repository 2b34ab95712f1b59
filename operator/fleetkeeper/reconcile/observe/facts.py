"""The state of a service's workloads in a snapshot, computed once for all decisions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleetkeeper.api import names
from fleetkeeper.reconcile.types import Kind, Pod, Revision, Snapshot, Workload

_NO_ROOM = re.compile(r"Insufficient |Too many pods|cannot allocate all claims")
"""Parts of the scheduler's verdict: resources, the number of pods, and devices of ResourceClaims."""
GONE_PHASES = frozenset({"Failed", "Succeeded"})
"""An evicted pod remains as an object for hours, but is not a replica anymore."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The engines and the router of one service, as read from the caches.

    `engine_pods` and `router_pods` exclude pods that are being deleted or have ended.
    `current` is the revision of the live template, None until Kubernetes has created it.
    """

    engine: Workload | None
    router: Workload | None
    revisions: tuple[Revision, ...]
    current: Revision | None
    engine_pods: tuple[Pod, ...]
    router_pods: tuple[Pod, ...]

    @property
    def ready_replicas(self) -> int:
        """Return the number of ready engine pods of all revisions."""
        return sum(pod.ready for pod in self.engine_pods)

    @property
    def available_replicas(self) -> int:
        """Return the number of engine pods that a rollout counts: ready for `minReadySeconds`.

        The Deployment counts them. Until its status follows, no more than the ready ones.
        """
        return min(self.engine.available_replicas if self.engine else 0, self.ready_replicas)

    @property
    def ready_routers(self) -> int:
        """Return the number of ready router pods."""
        return sum(pod.ready for pod in self.router_pods)

    @property
    def live_replicas(self) -> int | None:
        """Return the live `spec.replicas` of the engine Deployment, None if there is none."""
        return self.engine.desired_replicas if self.engine else None

    def are_available(self, *, has_router: bool) -> bool:
        """Return True if an engine pod is ready and, with a router, a router pod too."""
        return self.ready_replicas > 0 and (not has_router or self.ready_routers > 0)

    def pods_of(self, revision: Revision | None) -> tuple[Pod, ...]:
        """Return the engine pods of one revision, none for None."""
        if revision is None:
            return ()
        return tuple(pod for pod in self.engine_pods if pod.revision_uid == revision.uid)

    @property
    def updated_replicas(self) -> int:
        """Return the number of engine pods of the live template."""
        return len(self.pods_of(self.current))

    def revision_with(self, template_hash: str) -> Revision | None:
        """Return the newest revision with this template hash, None if there is none."""
        found = [item for item in self.revisions if item.template_hash == template_hash]
        return found[0] if found else None


def holds_accelerators(pod: Pod) -> bool:
    """Return True if a pod occupies its accelerators: it is on a node and has not ended."""
    return pod.scheduled and pod.phase not in GONE_PHASES


def lacks_room(pod: Pod) -> bool:
    """Return True if a node would fit the pod, but other pods use what it needs.

    A pod that no node accepts (labels, taints) does not lack room: no other pod's end would help it.
    """
    return not pod.scheduled and bool(_NO_ROOM.search(pod.unschedulable))


def facts_of(snapshot: Snapshot, service: str) -> Facts:
    """Return the facts of the service with this name."""
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
    """Return the revisions of the engine Deployment, newest first."""
    own = [item for item in snapshot.revisions if engine and item.deployment_uid == engine.uid]
    return tuple(sorted(own, key=lambda item: (-item.number, item.name)))


def _pods(snapshot: Snapshot, component: names.Component) -> tuple[Pod, ...]:
    """Return the pods of a component that are not ending, oldest first."""
    living = (
        pod
        for pod in snapshot.pods
        if pod.component == component and not pod.deleting and pod.phase not in GONE_PHASES
    )
    return tuple(sorted(living, key=lambda pod: (pod.created, pod.name)))
