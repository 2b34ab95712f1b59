"""Makers of pods, samples, services and their reports for the tests of the control loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleetkeeper.api.conditions import ConditionType, Reason, fit_message
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.decision import ControlDecision, TickResult
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.signals.samples import Counters, Gauges, Latencies, PodSample
from fleetkeeper.autoscale.tick import decide_service
from fleetkeeper.autoscale.types import ControlInputs, ControlSettings, PodView, PutOutcome
from fleetkeeper.common.values import ControlReport
from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.status.assessment import Assessment
from fleetkeeper.reconcile.status.control import report_to_status
from fleetkeeper.reconcile.status.degradation import by_load
from fleetkeeper.reconcile.status.measurements import limited_by_load, memory_within_cap
from fleetkeeper.reconcile.status.value import Value, false

NOW = 1_000_000.0


def pod_view(
    name: str = "chat-0", *, age_s: float = 3600.0, ready: bool = True, now: float = NOW
) -> PodView:
    """A pod created 60 s before it became ready `age_s` ago."""
    return PodView(
        name,
        f"uid-{name}",
        now - age_s - 60.0,
        ready=ready,
        ready_since=now - age_s if ready else None,
        ip="127.0.0.1",
        scheduled_since=now - age_s - 59.0,
        engine_since=now - age_s - 45.0,
    )


def steady_counters(seconds: float, **per_second: float) -> Counters:
    """Counters after `seconds` of a steady pod: 4 requests/s, 25 steps/s of 40 ms, all within."""
    rates = {
        "wait_count_standard": 4.0,
        "wait_sum_s_standard": 0.04,
        "wait_within_standard": 4.0,
        "arrivals_standard": 4.0,
        "arrivals_squared": 20.0,
        "batch_time_count": 25.0,
        "batch_time_sum_s": 1.0,
        "batch_time_within": 25.0,
        "steps": 25.0,
        "schedule_calls": 25.0,
        "prompt_tokens": 4000.0,
        "generation_tokens": 800.0,
    } | per_second
    return Counters(**{name: rate * seconds for name, rate in rates.items()})


def steady_latencies(seconds: float) -> Latencies:
    """What users saw in `seconds`: 0.3 s to the first token, 40 ms between two."""
    return Latencies(
        ttft_count_standard=4.0 * seconds,
        ttft_sum_s_standard=1.2 * seconds,
        itl_count_standard=800.0 * seconds,
        itl_sum_s_standard=32.0 * seconds,
    )


def sample(
    time: float,
    pod: str = "chat-0",
    *,
    gauges: Gauges | None = None,
    origin: float = NOW - 3600.0,
    **per_second: float,
) -> PodSample:
    """A sample of a steady pod at `time`."""
    gauges = gauges or Gauges(
        running=20.0,
        limit_sequences=32.0,
        limit_tokens=1024.0,
        kv_capacity_tokens=400_000.0,
        kv_resident_tokens=100_000.0,
        memory_used_ratio=0.7,
        memory_peak_ratio=0.75,
    )
    seconds = time - origin
    counters = steady_counters(seconds, **per_second)
    return PodSample(pod, time, counters, gauges, latencies=steady_latencies(seconds))


@dataclass
class Loop:
    """A service driven tick by tick with given samples."""

    settings: ControlSettings = field(default_factory=ControlSettings)
    replicas: int = 2
    now: float = NOW
    started: float = NOW - 7200.0
    memory: ControlMemory = field(default_factory=ControlMemory)
    pods: tuple[PodView, ...] = ()
    generation: float = 0.0
    outcomes: tuple[PutOutcome, ...] = ()

    def __post_init__(self) -> None:
        if not self.pods:
            self.pods = tuple(pod_view(f"chat-{i}") for i in range(self.replicas))

    def tick(self, samples: Sequence[PodSample] = (), **inputs: object) -> ControlDecision:
        """Decide one tick of 5 s."""
        base = ControlInputs(
            "team-a", "chat", self.settings, self.replicas, self.started, self.pods, tuple(samples)
        )
        decision, self.memory = decide_service(replace(base, **inputs), self.memory, self.now)  # type: ignore[arg-type]
        self.now += 5.0
        self.outcomes = tuple(PutOutcome(put.pod, put.generation, True) for put in decision.puts)
        self.generation = max([self.generation, *(float(put.generation) for put in decision.puts)])
        return decision

    def steady(self, ticks: int, **per_second: float) -> ControlDecision:
        """Ticks with fresh samples of every pod."""
        decision = self.tick(self.samples(None, **per_second))
        for _ in range(ticks - 1):
            decision = self.tick(self.samples(None, **per_second))
        return decision

    def samples(self, gauges: Gauges | None = None, **per_second: float) -> list[PodSample]:
        """Samples of now of every ready pod; its engine has read the newest limits."""
        rows = [
            sample(self.now, pod.name, gauges=gauges, **per_second)
            for pod in self.pods
            if pod.ready
        ]
        return [
            replace(row, gauges=row.gauges._replace(limit_generation=self.generation))
            for row in rows
        ]


def reported_status(report: ControlReport | None) -> dict[str, Any]:
    """The report in the status of an available service, with the conditions on its facts."""
    assert report is not None
    assert report.scaling is not None
    assessment = Assessment(1, {}, Facts(None, None, (), None, (), ()), control=report)
    decided = {
        ConditionType.MEMORY_WITHIN_CAP: memory_within_cap(assessment),
        ConditionType.SCALING_LIMITED: limited_by_load(report.scaling),
        ConditionType.DEGRADED: by_load(report) or false(Reason.AS_EXPECTED),
    }
    measured = {row.type: Value(row.status, row.reason, row.message) for row in report.conditions}
    conditions = [
        {
            "type": str(kind),
            "status": str(row.status),
            "reason": str(row.reason),
            "message": fit_message(row.message),
        }
        for kind, row in {**measured, **decided}.items()
    ]
    return {**report_to_status(report), "conditions": conditions}


def reported(
    loop: Loop, decision: ControlDecision, allocation: Allocation | None = None
) -> TickResult:
    """Return the report with the want granted, and carry on the memory."""
    given = allocation or Allocation(decision.want.replicas)
    report, loop.memory = build_report(decision, given, loop.memory, loop.now)
    return report


def condition(report: TickResult, kind: ConditionType) -> tuple[str, str, str]:
    """Return status, reason and message of a condition."""
    row = next(row for row in reported_status(report.report)["conditions"] if row["type"] == kind)
    return row["status"], row["reason"], row["message"]
