"""State of the pod as pid 1 knows it, and its block in shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper_engine.devices.interface import DeviceKind, DeviceMemory
from fleetkeeper_engine.devices.kinds import KINDS
from fleetkeeper_engine.policy import Policy
from fleetkeeper_engine.shm.layout import (
    CapBlock,
    HeartbeatBlock,
    MiddlewareBlock,
    SchedulerBlock,
    SupervisorBlock,
)
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import EngineDocument
from fleetkeeper_engine.supervisor.health import (
    NO_ANSWER,
    NO_STEP,
    SERVER_PERIOD_S,
    Progress,
    Readiness,
    decide_progress,
    is_live,
    is_moving,
    work_of,
)
from fleetkeeper_engine.supervisor.idle import Activity, decide_activity
from fleetkeeper_engine.supervisor.limits_requests import (
    LimitsLease,
    LimitsRequest,
    allowed_ranges,
    decide_lease,
)
from fleetkeeper_engine.supervisor.memory.watch import MemoryState, decide_memory
from fleetkeeper_engine.supervisor.output import Outlet
from fleetkeeper_engine.supervisor.policy_file import start_policy
from fleetkeeper_engine.supervisor.start_stages import StartStage, StartTimes, stage_seconds

SERVER_PATIENCE_S = 20.0
"""The pod is not ready if vLLM's API server has not answered this long after its check was due."""
OPEN_ADMIT = (1.0, 1.0, 1.0)
SETTINGS_SHARES = (1.0, 1.0, 0.0)
"""Shares that stand for the start-up settings."""


@dataclass(slots=True)
class PodState:
    """The pod's state.

    The supervisor's loops write it, the control port reads it. Times are monotonic seconds.
    """

    document: EngineDocument
    region: Region
    memory: MemoryState
    outlets: tuple[Outlet, ...] = ()
    """Outlets for the output of the engine and for the log."""
    began: float = field(default_factory=time.monotonic)
    vllm_version: str = "unknown"
    lease: LimitsLease = field(default_factory=LimitsLease)
    kind: DeviceKind = field(init=False)
    policy: Policy = field(init=False)
    progress: Progress = field(default_factory=Progress)
    activity: Activity = field(default_factory=Activity)
    started: bool = False
    child_alive: bool = False
    draining: bool = False
    admission_closed: bool = False
    drain_deadline: float = 0.0
    """When running responses are ended at a whole frame; 0 without a drain."""
    first_answer: float | None = None
    """When vLLM's API server first answered."""
    ready_at: float | None = None
    """When the first token was generated and the warm-up was over."""
    server_answered: float | None = None
    """When vLLM's API server last answered; None before it started."""
    control_answers: dict[int, int] = field(
        default_factory=lambda: {200: 0, 401: 0, 409: 0, 422: 0}
    )

    def __post_init__(self) -> None:
        """Apply the document's policy until a file replaces it."""
        self.kind = KINDS[self.document.accelerator]
        self.policy = start_policy(self.document)

    def apply_policy(self, policy: Policy | None, now: float) -> bool:
        """Apply a policy (None: the document's). Return True if it differs from the previous one."""
        wanted = policy or start_policy(self.document)
        if wanted == self.policy:
            return False
        self.policy = wanted
        self.write(now)
        return True

    def write(self, now: float) -> None:
        """Write everything that the engine must know to shared memory."""
        self.region.write_supervisor(self._block(now))

    def _block(self, now: float) -> SupervisorBlock:
        request = self.lease.request
        return SupervisorBlock(
            generation=request.generation if request else 0,
            sequences=request.sequences if request else 0,
            tokens=request.tokens if request else 0,
            lease_deadline=self.lease.deadline,
            admit=request.admit.filled(OPEN_ADMIT) if request else OPEN_ADMIT,
            shares=request.shares.filled(SETTINGS_SHARES) if request else SETTINGS_SHARES,
            draining=self.admission_closed,
            drain_deadline=self.drain_deadline,
            cap_exceeded=self.memory.over_cap,
            queue_limits=self.policy.queue_limits,
            batch_share_ratio=self.policy.batch_share_ratio,
            batch_floor_ratio=self.policy.batch_floor_ratio,
            queue_wait_objective_s=self.policy.queue_wait_objective_s,
            written=now,
        )

    def accept(self, request: LimitsRequest, epoch: int, now: float) -> None:
        """Apply a request for limits.

        Raises:
            RefusedLimitsRequestError: 409, if a newer one is in force.
        """
        self.lease = decide_lease(self.lease, request, epoch, now)
        self.write(now)

    def observe_memory(self, use: DeviceMemory, now: float) -> bool:
        """Record a sample. Return True if it stops or resumes the start of new sequences."""
        before = self.memory.over_cap
        self.memory = decide_memory(self.memory, use, now)
        if self.memory.over_cap == before:
            return False
        self.write(now)
        return True

    def observe(self, now: float) -> None:
        """Update progress and activity from the blocks of scheduler and middleware."""
        scheduler, middleware = self.scheduler(), self.middleware()
        self.progress = decide_progress(
            self.progress,
            scheduler,
            self.heartbeat(),
            middleware,
            now,
            throttled=self.memory.over_cap,
            started=self.started,
        )
        self.activity = decide_activity(
            self.activity, scheduler, middleware, now, started=self.started
        )

    def scheduler(self) -> SchedulerBlock | None:
        """Return the engine's block."""
        return self.region.read_scheduler()

    def heartbeat(self) -> HeartbeatBlock:
        """Return the heartbeat before the engine's last step."""
        return self.region.read_heartbeat()

    def middleware(self) -> MiddlewareBlock | None:
        """Return the middleware's block."""
        return self.region.read_middleware()

    def caps(self) -> list[CapBlock]:
        """Return the blocks of the ranks that have reported."""
        found = (self.region.read_cap(rank) for rank in range(self.region.ranks))
        return [cap for cap in found if cap is not None]

    def cap_obstacle(self) -> str:
        """Return why not every rank's allocator is limited to the cap; empty if it is, and if nothing limits it."""
        if not self.kind.capabilities.allocator_limit or self.region.caps_armed():
            return ""
        refusals = [cap.refusal(self.kind.process_list) for cap in self.caps() if not cap.armed]
        return ": ".join(["the memory cap is not armed on every rank", *refusals[:1]])

    def start_seconds(self, now: float) -> dict[StartStage, float]:
        """Return the seconds of each stage of the start that has begun."""
        loaded = self.region.all_loaded()
        return stage_seconds(StartTimes(self.began, loaded, self.first_answer, self.ready_at), now)

    def ranges(self) -> dict[str, Any]:
        """Return the allowed ranges of a request for limits."""
        block = self.scheduler()
        ceilings = (
            (block.ceiling_sequences, block.ceiling_tokens) if block and block.supported else None
        )
        return allowed_ranges(self.document.batching, ceilings)

    def unfinished(self) -> int:
        """Return the requests in the engine and in front of it."""
        middleware = self.middleware()
        queued = sum(middleware.waiting) if middleware else 0
        return (work_of(self.scheduler(), middleware) or 0) + queued

    def is_applied(self) -> bool:
        """Return whether the scheduler has read the newest request, or is idle and will at its next step."""
        block, heartbeat = self.scheduler(), self.heartbeat()
        if block is None or self.lease.request is None:
            return True
        idle = not sum(block.running) and not sum(block.waiting) and not heartbeat.steps
        return idle or block.generation == self.lease.request.generation

    def readiness(self, now: float) -> Readiness:
        """Return the conditions of readiness."""
        is_stalled = not is_moving(self.progress, now, self._stall_s)
        return Readiness(
            started=self.started,
            cap=self.cap_obstacle(),
            draining=self.draining,
            hang=self._hang(now, SERVER_PATIENCE_S, is_stalled=is_stalled),
            child_alive=self.child_alive,
        )

    def hang(self, now: float) -> str:
        """Return why the pod is not live: the engine or vLLM's API server hangs. Empty if it is live."""
        if not self.started:
            return ""
        is_stalled = not is_live(self.progress, now, self._stall_s)
        return self._hang(now, self._stall_s, is_stalled=is_stalled)

    def _hang(self, now: float, patience_s: float, *, is_stalled: bool) -> str:
        if is_stalled:
            return NO_STEP
        return NO_ANSWER if self.server_silent(now, patience_s) else ""

    def is_hung(self, now: float) -> bool:
        """Return the verdict for the operator: whether the engine is stalled beyond its allowance.

        It is more cautious than `hang`: while memory is above its cap, requests wait on purpose.
        A silent API server matters for the liveness probe alone.
        """
        stalled = not is_live(self.progress, now, self._stall_s)
        return self.started and stalled and not self.memory.over_cap

    def server_silent(self, now: float, patience_s: float) -> bool:
        """Return whether an answer of vLLM's API server is overdue by more than `patience_s`."""
        answered = self.server_answered
        return answered is not None and now - answered > patience_s + SERVER_PERIOD_S

    @property
    def _stall_s(self) -> float:
        return float(self.document.health.stall_seconds)
