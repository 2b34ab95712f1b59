"""The findings of one reconcile, from which the status, conditions and events are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, Status, previous_condition
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.common.activation import activation_of
from fleetkeeper.common.sleep import Sleep
from fleetkeeper.common.values import ControlReport, StartProgress
from fleetkeeper.reconcile.manifests.rollout import rollout_pods
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.observe.problem import Problem
from fleetkeeper.reconcile.prefetch import PrefetchDecision
from fleetkeeper.reconcile.replicas import ReplicaDecision
from fleetkeeper.reconcile.rollout import RolloutDecision
from fleetkeeper.reconcile.types import Defect, Pod


@dataclass(frozen=True, slots=True)
class Assessment:
    """The observed state, the desired state, and the problems between them.

    `service` is None when the spec is invalid or cannot be read. `blocked` is the reason why no
    child is written at all. `engine_problems` are the problems of engine pods that are not ready,
    those of the current revision first. `creation_problem` is the reason why engine pods cannot be
    created, `write_problem` the reason why a child cannot be written. `grants_problem` is the reason why engines
    refuse every request. `lack` and `swap_problem` are the reasons why an only replica is not replaced: no
    accelerator for its successor, and no gateway that holds requests. `flapping` is the problem of
    a ready pod that keeps terminating. `pods` are all engine pods, including those that are being
    deleted, and `pod_problems` their problems by name. `starts` is the progress that starting engines
    report, by pod name. `is_router_bypassed` is true while the address still selects
    the engines because no router is ready yet. `router_kind` is the value of `status.router` (None: as
    before). `owns_address` is whether the Kubernetes Service that
    clients call is ours (None: there is none, as far as is known).
    """

    generation: int
    previous: Mapping[str, Any]
    facts: Facts
    service: InferenceService | None = None
    blocked: Problem | None = None
    replicas: ReplicaDecision | None = None
    suspended_replicas: int | None = None
    sleep: Sleep | None = None
    lack: Problem | None = None
    swap_problem: Problem | None = None
    rollout: RolloutDecision = field(default_factory=RolloutDecision)
    prefetch: PrefetchDecision = field(default_factory=PrefetchDecision)
    wanted_hash: str = ""
    engine_problems: tuple[Problem, ...] = ()
    router_problem: Problem | None = None
    creation_problem: Problem | None = None
    write_problem: Problem | None = None
    grants_problem: Problem | None = None
    is_router_bypassed: bool = False
    router_kind: str | None = None
    owns_address: bool | None = None
    flapping: Problem | None = None
    pods: tuple[Pod, ...] = ()
    pod_problems: Mapping[str, Problem] = field(default_factory=dict)
    starts: Mapping[str, StartProgress] = field(default_factory=dict)
    control: ControlReport | None = None
    control_pending: bool = False
    defect: Defect | None = None

    @property
    def is_paused(self) -> bool:
        """Return True if spec.paused stops all writes to children."""
        return self.service is not None and self.service.spec.paused

    @property
    def is_stopped(self) -> bool:
        """Return True if no replica is wanted."""
        return self.replicas is not None and self.replicas.wanted == 0

    @property
    def is_suspended(self) -> bool:
        """Return True if no replica is wanted because of spec.suspend."""
        return self.replicas is not None and self.replicas.reason is Reason.SUSPENDED

    @property
    def is_asleep(self) -> bool:
        """Return True if no replica is wanted because no request comes."""
        return self.replicas is not None and self.replicas.reason is Reason.ASLEEP

    @property
    def rest_reason(self) -> Reason:
        """Return the reason why a service that sleeps has no replica."""
        never_started = self.sleep is not None and self.sleep.never_started
        return Reason.NEVER_STARTED if never_started else Reason.ASLEEP

    @property
    def is_waking(self) -> bool:
        """Return True if the first replica starts after a sleep."""
        return self.sleep is not None and self.sleep.is_waking and not self.is_stopped

    @property
    def is_swapping(self) -> bool:
        """Return True if the only replica is replaced while gateways hold its requests."""
        return self.sleep is not None and self.sleep.is_swapping

    @property
    def is_new_generation(self) -> bool:
        """Return True if the status describes another generation."""
        return bool(self.previous.get("observedGeneration") != self.generation)

    @property
    def has_router(self) -> bool:
        """Return True if requests pass through a router.

        The spec decides. Without a readable spec, a live router Deployment does.
        """
        if self.service is None:
            return self.facts.router is not None
        if self.is_router_bypassed:
            return False
        return str(self.service.spec.routing.policy) != "None"

    @property
    def is_available(self) -> bool:
        """Return True if an engine pod is ready and, with a router, a router pod too."""
        return self.facts.are_available(has_router=self.has_router)

    @property
    def target_hash(self) -> str:
        """Return the hash of the template to run: the wanted one or, rolled back, the last good."""
        current = self.facts.current
        if self.rollout.rollback is None:
            return self.wanted_hash
        good = [item for item in self.facts.revisions if item.name == self.rollout.revision]
        return good[0].template_hash if good else (current.template_hash if current else "")

    @property
    def is_on_target(self) -> bool:
        """Return True if the live template and all engine pods are of the target template."""
        current = self.facts.current
        if current is None or not self.target_hash or current.template_hash != self.target_hash:
            return False
        has_old = any(
            item.desired_replicas > 0 for item in self.facts.revisions if item.uid != current.uid
        )
        return not has_old and all(
            pod.revision_uid == current.uid for pod in self.facts.engine_pods
        )

    @property
    def needed_replicas(self) -> int:
        """Return the number of ready replicas that the condition Ready requires."""
        if self.service is None:
            return 1
        spec = self.service.spec
        activation = activation_of(spec)
        floor = activation.floor(spec.scaling.min_replicas)
        if not activation.is_scaled:
            floor -= rollout_pods(spec.rollout, floor)[1]
        return max(1, floor)

    @property
    def is_rolled_out(self) -> bool:
        """Return True if the current generation runs on as many ready replicas as it needs.

        Once rolled out, a generation stays so when a replica fails later.
        """
        if self.blocked or self.write_problem or self.is_router_bypassed:
            return False
        if self.rollout.rollback or not self.is_on_target:
            return False
        if self.is_stopped:
            return self.facts.live_replicas == 0
        was_rolled_out = not self.is_new_generation and (
            previous_condition(self.previous, ConditionType.RECONCILING) is None
            and previous_condition(self.previous, ConditionType.READY) is not None
        )
        return was_rolled_out or self.facts.ready_replicas >= self.needed_replicas

    @property
    def was_ready(self) -> bool:
        """Return True if the previous status has Ready=True."""
        ready = previous_condition(self.previous, ConditionType.READY)
        return ready is not None and ready.get("status") == Status.TRUE

    @property
    def problem(self) -> Problem | None:
        """Return the first problem that keeps replicas from being ready."""
        if self.engine_problems:
            return self.engine_problems[0]
        return self.creation_problem or self.write_problem
