"""Everything that one look at a service found, before it is put into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Status
from fleetkeeper.api.parse import InferenceService
from fleetkeeper.plan.facts import Facts
from fleetkeeper.plan.model import Defect, Manifest
from fleetkeeper.plan.previous import previous_condition
from fleetkeeper.plan.reasons import Problem
from fleetkeeper.plan.replicas import ReplicaDecision
from fleetkeeper.plan.rollout import RolloutDecision


@dataclass(frozen=True, slots=True)
class Assessment:
    """What is, what is wanted and what stands between.

    `blocked` is why no child is written at all. `engine_problems` are those of engine pods that are
    not ready, the current revision's first; `creation_problem` why engine pods cannot be made;
    `write_problem` why a child cannot be written; `is_router_bypassed` says that the address still
    leads to the engines, because no router is ready yet; `flapping` a ready pod that keeps ending. `service` is None when the spec cannot be read.
    """

    generation: int
    previous: Mapping[str, Any]
    facts: Facts
    service: InferenceService | None = None
    blocked: Problem | None = None
    replicas: ReplicaDecision | None = None
    rollout: RolloutDecision = field(default_factory=RolloutDecision)
    wanted_hash: str = ""
    engine_problems: tuple[Problem, ...] = ()
    router_problem: Problem | None = None
    creation_problem: Problem | None = None
    write_problem: Problem | None = None
    is_router_bypassed: bool = False
    flapping: Problem | None = None
    control: Manifest | None = None
    control_pending: bool = False
    defect: Defect | None = None

    @property
    def is_paused(self) -> bool:
        """Whether spec.paused holds all writes back."""
        return self.service is not None and self.service.spec.paused

    @property
    def is_stopped(self) -> bool:
        """Whether no replica is wanted."""
        return self.replicas is not None and self.replicas.wanted == 0

    @property
    def is_new_generation(self) -> bool:
        """Whether the status tells of another generation."""
        return bool(self.previous.get("observedGeneration") != self.generation)

    @property
    def has_router(self) -> bool:
        """Whether requests come through a router: as the spec says, else as what runs says."""
        if self.service is None:
            return self.facts.router is not None
        if self.is_router_bypassed:
            return False
        return str(self.service.spec.routing.policy) != "None"

    @property
    def is_available(self) -> bool:
        """Whether the address answers: an engine and, with a router, a router pod is ready."""
        return self.facts.ready_replicas > 0 and (
            not self.has_router or self.facts.ready_routers > 0
        )

    @property
    def target_hash(self) -> str:
        """The template that shall run: the wanted one, or the last good one after a rollback."""
        current = self.facts.current
        if self.rollout.rollback is None:
            return self.wanted_hash
        good = [item for item in self.facts.revisions if item.name == self.rollout.revision]
        return good[0].template_hash if good else (current.template_hash if current else "")

    @property
    def is_on_target(self) -> bool:
        """Whether all engine pods, and at least the live template, are of the target template."""
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
        """Ready replicas that the condition Ready asks for."""
        if self.service is None:
            return 1
        spec = self.service.spec
        if spec.replicas is not None:
            return max(1, spec.replicas - spec.rollout.max_unavailable)
        return max(1, spec.scaling.min_replicas)

    @property
    def is_rolled_out(self) -> bool:
        """Whether the current generation runs, on as many ready replicas as it needs.

        Once it did, a replica that fails later does not make the generation "not rolled out".
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
        """Whether the status says Ready=True."""
        ready = previous_condition(self.previous, ConditionType.READY)
        return ready is not None and ready.get("status") == Status.TRUE

    @property
    def problem(self) -> Problem | None:
        """The first cause that keeps replicas from being ready."""
        if self.engine_problems:
            return self.engine_problems[0]
        return self.creation_problem or self.write_problem
