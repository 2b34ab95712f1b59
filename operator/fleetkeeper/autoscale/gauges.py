"""The gauges and counters of one service after a tick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.api.types import BatchingMode
from fleetkeeper.autoscale.decided import SUBJECTS, Decided
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.signals.starts import median_seconds

_STATES = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 0.5, BreakerState.OPEN: 1.0}

Gauge = tuple[str, tuple[tuple[str, str], ...], float]


def gauges_of(decision: ControlDecision, desired: int) -> tuple[Gauge, ...]:
    """Return the gauges of one service; the runtime adds the labels service_namespace and inference_service."""
    signals, settings = decision.signals, decision.settings
    gauges: list[Gauge] = [
        ("decision_replicas", (("kind", "recommended"),), float(decision.replicas.value)),
        ("decision_replicas", (("kind", "allocated"),), float(desired)),
        ("decision_replicas", (("kind", "live"),), float(decision.live_replicas)),
        ("decision_replicas", (("kind", "ready"),), float(signals.ready_pods)),
        ("decision_limit_sequences", (), float(decision.in_force.sequences)),
        ("decision_limit_tokens", (), float(decision.in_force.tokens)),
        ("decision_advisory", (), float(settings.batching_mode is BatchingMode.ADVISORY)),
        ("breaker_state", (("breaker", "control"),), _STATES[decision.breakers.control.state]),
        ("breaker_state", (("breaker", "source"),), _STATES[decision.breakers.source.state]),
        ("signal_coverage_ratio", (), signals.coverage),
        ("signal_queue_wait_seconds", (), signals.queue_wait_s),
        ("signal_batch_time_seconds", (), signals.batch_time_s),
        ("signal_arrivals_per_second", (), signals.arrivals_per_s),
        ("signal_waiting", (), signals.waiting),
        ("signal_running", (), signals.gauges.running),
        ("signal_kv_ratio", (), signals.kv_ratio),
        ("objective_queue_wait_seconds", (), settings.queue_wait_objective_s),
        ("objective_batch_time_seconds", (), settings.batch_time_objective_s),
        ("pressure_ratio", (), decision.pressure),
        ("model_capacity_sequences", (), decision.state.estimate.capacity),
        ("cold_start_seconds", (), decision.state.estimate.cold_start.seconds),
    ]
    if decision.deadline is not None:
        gauges.append(("model_batch_tokens_per_second", (), decision.deadline.given_per_s))
    for stage, seconds in median_seconds(decision.state.inputs.pods).items():
        gauges.append(("replica_start_seconds", (("stage", stage),), seconds))
    if signals.ttft_s is not None:
        gauges.append(("signal_time_to_first_token_seconds", (), signals.ttft_s))
    if signals.itl_s is not None:
        gauges.append(("signal_inter_token_latency_seconds", (), signals.itl_s))
    if settings.restart_fragmented:
        gauges.append(("signal_fragmentation_ratio", (), decision.fragmentation_ratio))
        why = (("reason", str(decision.restart.reason)),)
        gauges.append(("decision_restart", why, float(decision.restart.valid)))
    tiers = decision.breakers.load.by_tier()
    for tier, admit in zip(tiers, decision.admission.admit, strict=True):
        gauges.append(("breaker_state", (("breaker", tier),), _STATES[tiers[tier].state]))
        gauges.append(("admit_ratio", (("tier", tier),), admit))
    return tuple(gauges)


def counts_of(decision: ControlDecision, made: Sequence[Decided]) -> tuple[Gauge, ...]:
    """Return the increments of one service's counters in a tick; `made` are its decisions.

    All series are returned, most with 0: a counter that begins with its first event has no increase.
    """
    subjects = Counter(str(item.subject) for item in made)
    decided = (
        ("service_decisions", (("subject", subject),), float(subjects[subject]))
        for subject in SUBJECTS
    )
    return (*decided, *_objective_counts(decision))


def _objective_counts(decision: ControlDecision) -> Iterator[Gauge]:
    """Yield whether each objective is met in this tick. Without signals or requests, nothing counts."""
    signals, settings = decision.signals, decision.settings
    counts = signals.known and not signals.idle
    for objective, found_s, objective_s in (
        ("queue_wait", signals.queue_wait_s, settings.queue_wait_objective_s),
        ("batch_time", signals.batch_time_s, settings.batch_time_objective_s),
    ):
        result = "met" if found_s <= objective_s else "missed"
        for known in ("met", "missed"):
            labels = (("objective", objective), ("result", known))
            yield "objective_ticks", labels, float(counts and known == result)
