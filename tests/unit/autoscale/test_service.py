"""One service, tick by tick: holds, modes, status, restart, and nothing lost on missing data."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from fleetkeeper.api import rfc3339
from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.status import InferenceServiceStatus
from fleetkeeper.api.types import BatchingMode, ScalingMode
from fleetkeeper.autoscale.arbitrate import Allocation
from fleetkeeper.autoscale.constants import LOST_TICKS
from fleetkeeper.autoscale.decision import ControlDecision, TickResult
from fleetkeeper.autoscale.memory import (
    ControlMemory,
    memory_from_status,
)
from fleetkeeper.autoscale.report import build_report
from fleetkeeper.autoscale.rules.control_breaker import ControlBreaker
from fleetkeeper.autoscale.rules.scale_down import ReplicasMemory
from fleetkeeper.autoscale.rules.source_breaker import decide_source_breaker
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.signals.samples import Gauges, PodSample, Source
from fleetkeeper.autoscale.types import (
    BreakerState,
    ControlSettings,
    Limits,
    PutOutcome,
)
from fleetkeeper.common.values import CAUSE_UNKNOWN, Remedy
from fleetkeeper.reconcile.status.control import report_to_status
from tests.support.control_cases import NOW, Loop, pod_view, reported_status, sample
from tests.support.lanes import keep_first


def reported(
    loop: Loop, decision: ControlDecision, allocation: Allocation | None = None
) -> TickResult:
    """The report with the want granted, memory carried on."""
    given = allocation or Allocation(decision.want.replicas)
    report, loop.memory = build_report(decision, given, loop.memory, loop.now)
    return report


def condition(report: TickResult, kind: ConditionType) -> tuple[str, str, str]:
    """Status, reason, message."""
    row = next(row for row in reported_status(report.report)["conditions"] if row["type"] == kind)
    return row["status"], row["reason"], row["message"]


def test_same_inputs_same_answer() -> None:
    """Decisions are pure."""
    one, two = Loop(), Loop()
    assert one.steady(20) == two.steady(20)
    assert one.memory == two.memory


def test_nothing_is_known_at_first_and_everything_is_held() -> None:
    """No sample yet: no zero, no change."""
    decision = Loop().tick()
    assert not decision.replicas.valid
    assert decision.replicas.value == 2
    assert decision.puts == () or all(put.limits == decision.in_force for put in decision.puts)


def test_a_calm_service_is_left_alone() -> None:
    """An hour of steady load within the objectives: no change of replicas, one order of limits a pod, then leases."""
    loop = Loop()
    puts = 0
    for _ in range(720):
        decision = loop.tick(loop.samples(), put_outcomes=())
        puts += len(decision.puts)
        assert decision.replicas.value == 2
    assert puts <= 2 * (3600 / 60 + 3)


SILENCES = ["nothing", "stale", "nan", "future", "gone back", "half", "unknown pods"]


@pytest.mark.parametrize("silence", SILENCES)
def test_signals_lost_for_three_ticks_open_the_control_breaker(silence: str) -> None:
    """However they are lost; replicas stay, the start-up limits come back, and it recovers."""
    loop = Loop()
    loop.steady(10)
    lost_at = loop.now
    states = []
    for _ in range(24):
        decision = loop.tick(silent_samples(loop, silence, lost_at))
        states.append(decision.breakers.control.state)
        assert decision.replicas.value == 2
    if silence != "half":
        assert BreakerState.OPEN in states
        assert decision.in_force == Limits(256, 8192)
    for _ in range(80):
        decision = loop.tick(loop.samples())
    assert decision.breakers.control.state is BreakerState.CLOSED


def test_a_new_leader_is_not_blind_before_it_had_time_to_look() -> None:
    """Half a minute without signals after a start opens nothing; after that three ticks do."""
    loop = Loop(started=NOW)
    opened = None
    while opened is None and loop.now < NOW + 300:
        decision = loop.tick()
        if decision.breakers.control.state is BreakerState.OPEN:
            opened = loop.now - 5 - NOW
    assert opened == 40.0


def silent_samples(loop: Loop, silence: str, lost_at: float) -> list[PodSample]:
    """Samples of a tick in which signals are lost in one way."""
    rows = loop.samples()
    if silence in {"nothing", "half"}:
        return rows[:1] if silence == "half" else []
    match silence:
        case "stale":
            return [sample(lost_at - 5, row.pod) for row in rows]
        case "nan":
            return [replace(row, gauges=row.gauges._replace(running=math.nan)) for row in rows]
        case "future":
            return [replace(row, time=row.time + 3600) for row in rows]
        case "gone back":
            return [sample(loop.now, row.pod, origin=loop.now - 1) for row in rows]
    return [replace(row, pod=f"ghost-{row.pod}") for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep_first(1, range(10), pytest.mark.exhaustive))
def test_no_replica_goes_on_missing_data_in_100_000_random_ticks(seed: int) -> None:
    """Random outages, garbage and silence of every kind: never one scale-down in a tick without full, fresh data."""
    random = Random(seed)
    ticks = lowered = 0
    while ticks < 10_000:
        settings = ControlSettings(
            min_replicas=1, max_replicas=8, scale_down_delay_s=random.choice([30.0, 60.0, 300.0])
        )
        replicas = random.randint(1, 4)
        loop = Loop(settings=settings, replicas=replicas, started=NOW)
        directly = random.random() < 0.5
        kind, left, last_well = "nothing", 0, NOW - 1e9
        for _ in range(250):
            if left == 0:
                kind, left = (
                    random.choice([*SILENCES, "one pod", "lost", "well", "well"]),
                    random.randint(1, 40),
                )
            left -= 1
            quiet = {
                "wait_count_standard": 0.0,
                "arrivals_standard": 0.0,
                "batch_time_count": 0.0,
                "batch_time_sum_s": 0.0,
                "batch_time_within": 0.0,
                "steps": 0.0,
                "wait_within_standard": 0.0,
                "wait_sum_s_standard": 0.0,
                "prompt_tokens": 0.0,
                "generation_tokens": 0.0,
                "arrivals_squared": 0.0,
                "schedule_calls": 0.0,
            }
            rows = [
                replace(row, counters=row.counters._replace(steps=1e6))
                for row in loop.samples(gauges=Gauges(kv_capacity_tokens=1e5), **quiet)
            ]
            if kind in {"well", "lost"} or (kind == "one pod" and loop.replicas == 1):
                last_well = loop.now
            if kind == "one pod":
                rows = rows[:1]
            elif kind not in {"well", "lost"}:
                rows = silent_rows(loop, kind, rows)
            if directly or kind == "lost":
                rows = [replace(row, source=Source.DIRECT) for row in rows]
            missed = not directly and kind in {"nothing", "lost"}
            decision = loop.tick(rows, prometheus_lost=missed)
            ticks += 1
            if decision.replicas.value < loop.replicas:
                lowered += 1
                assert loop.now - 5 - last_well <= 5.0, kind
                assert kind not in {"nan", "future", "gone back"}, kind
                assert directly or kind != "lost", "not while Prometheus is missed"
                assert decision.signals.coverage == 1.0
            assert 1 <= decision.replicas.value <= 8
            loop.replicas = decision.replicas.value
            loop.pods = loop.pods[: loop.replicas]
    assert lowered > 10, "the loop must also be able to go down when all is known"


def silent_rows(loop: Loop, kind: str, rows: list[PodSample]) -> list[PodSample]:
    """The given samples, spoilt in one way."""
    if kind in {"nothing", "half"}:
        return rows[: len(rows) // 2] if kind == "half" else []
    match kind:
        case "stale":
            return [replace(row, time=loop.now - 120) for row in rows]
        case "nan":
            return [replace(row, gauges=row.gauges._replace(running=math.nan)) for row in rows]
        case "future":
            return [replace(row, time=row.time + 3600) for row in rows]
        case "gone back":
            return [
                replace(row, counters=row.counters._replace(steps=2e6 - loop.now)) for row in rows
            ]
    return [replace(row, pod=f"ghost-{row.pod}") for row in rows]


def test_no_scale_down_for_one_delay_after_the_operators_start() -> None:
    """Also when the memory before the restart said otherwise."""
    settings = ControlSettings(scale_down_delay_s=300.0)
    loop = Loop(settings=settings, replicas=3, started=NOW)
    loop.memory = replace(loop.memory, replicas=ReplicasMemory(((NOW - 200, 1),), since=NOW - 9999))
    first = None
    for _ in range(120):
        decision = loop.tick(
            loop.samples(wait_count_standard=0.1, arrivals_standard=0.1, wait_within_standard=0.1),
        )
        if decision.replicas.value < 3 and first is None:
            first = loop.now - NOW
    assert first is None or first >= 300


@pytest.mark.parametrize(
    ("mode", "pinned", "paused"),
    [
        (ScalingMode.ADVISORY, None, False),
        (ScalingMode.EXTERNAL, 2, False),
        (ScalingMode.AUTO, 3, False),
        (ScalingMode.AUTO, None, True),
    ],
)
def test_modes_that_do_not_act_give_no_order(
    mode: ScalingMode, pinned: int | None, paused: bool
) -> None:
    """Computed and reported, nothing done."""
    settings = ControlSettings(scaling_mode=mode, pinned_replicas=pinned, paused=paused)
    loop = Loop(settings=settings)
    waiting = Gauges(
        running=60,
        waiting_standard=90,
        oldest_wait_s_standard=9.0,
        limit_sequences=32,
        kv_capacity_tokens=4e5,
    )
    for _ in range(12):
        decision = loop.tick(loop.samples(gauges=waiting, batch_time_sum_s=1.2))
        assert reported(loop, decision).allocation is None
    if mode is ScalingMode.ADVISORY:
        report = reported(loop, decision)
        assert reported_status(report.report)["scaling"]["wanted"] > 2
        assert condition(report, ConditionType.SCALING_LIMITED)[1] == Reason.ADVISORY


OVERLOADED = Gauges(
    running=60, waiting_standard=90, oldest_wait_s_standard=9.0, kv_capacity_tokens=4e5
)


def test_fixed_orders_the_start_up_limits_at_once_whatever_held_before() -> None:
    """Limits of a lease do not linger; under load admission goes along with the same limits."""
    loop = Loop(settings=ControlSettings(batching_mode=BatchingMode.FIXED))
    first = loop.tick(loop.samples()).puts
    assert first
    assert all(put.limits == Limits(256, 8192) for put in first)
    assert all(put.admission.admit == (1.0, 1.0, 1.0) for put in first)
    puts = [put for _ in range(10) for put in loop.tick(loop.samples(gauges=OVERLOADED)).puts]
    assert all(put.limits == Limits(256, 8192) for put in puts)
    assert puts[-1].admission.admit[2] < 1.0


def test_advisory_sends_nothing_also_when_the_load_breaker_opens() -> None:
    """It is computed and reported as what would be; no engine hears of it, nothing is called degraded."""
    loop = Loop(settings=ControlSettings(batching_mode=BatchingMode.ADVISORY))
    loop.steady(10)
    told: list[str] = []
    for _ in range(20):
        decision = loop.tick(loop.samples(gauges=OVERLOADED))
        told += [event.message for event in decision.events]
        assert decision.puts == ()
        assert decision.admission.admit == (1.0, 1.0, 1.0)
    report = reported(loop, decision)
    assert reported_status(report.report)["breaker"]["load"]["batch"] == "Open"
    assert condition(report, ConditionType.DEGRADED)[0] == "False"
    assert any("batch would shed" in text for text in told)
    assert not any("sheds" in text for text in told)


def test_engines_without_live_limits_are_steered_by_replicas_only() -> None:
    """The engine runs as it is."""
    loop = Loop()
    gauges = Gauges(running=20, live_limits=0.0, kv_capacity_tokens=4e5)
    loop.tick(loop.samples(gauges=gauges))
    assert all(not loop.tick(loop.samples(gauges=gauges)).puts for _ in range(10))


def test_first_action_within_fifteen_seconds_of_a_broken_objective() -> None:
    """Limit, gate or replicas."""
    loop = Loop()
    before = loop.steady(30)
    broken_at = loop.now
    waiting = Gauges(
        running=64,
        waiting_standard=40,
        oldest_wait_s_standard=1.9,
        limit_sequences=32,
        kv_capacity_tokens=4e5,
        kv_resident_tokens=1e5,
    )
    for _ in range(10):
        decision = loop.tick(loop.samples(gauges=waiting))
        if (decision.in_force, decision.admission, decision.replicas.value) != (
            before.in_force,
            before.admission,
            2,
        ):
            break
    assert loop.now - 5 - broken_at <= 15


def test_failed_puts_open_the_control_breaker() -> None:
    """Three ticks of refused PUTs within five minutes."""
    loop = Loop()
    outcomes: tuple[PutOutcome, ...] = ()
    for _ in range(20):
        decision = loop.tick(loop.samples(), put_outcomes=outcomes)
        outcomes = tuple(PutOutcome(put.pod, put.generation, False) for put in decision.puts)
    assert decision.breakers.control.state is BreakerState.OPEN
    assert decision.breakers.control.reason == "ActuatorFailed"


@pytest.mark.parametrize(("fallback", "want"), [(None, 2), (1, 2), (5, 5), (99, 8)])
def test_fallback_replicas_while_the_control_breaker_is_open(
    fallback: int | None, want: int
) -> None:
    """max(current, fallback), within the maximum."""
    loop = Loop(settings=ControlSettings(fallback_replicas=fallback))
    loop.steady(6)
    for _ in range(30):
        decision = loop.tick()
    assert decision.breakers.control.state is BreakerState.OPEN
    assert decision.replicas.value == want


def test_disabled_breakers_only_report() -> None:
    """States are shown, nothing is refused, limits are not reset."""
    loop = Loop(settings=ControlSettings(breakers_act=False))
    loop.steady(10)
    held = loop.tick(loop.samples()).in_force
    for _ in range(30):
        decision = loop.tick()
    assert decision.breakers.control.state is BreakerState.OPEN
    assert decision.in_force == held
    assert decision.admission.admit == (1.0, 1.0, 1.0)


def test_the_lost_prometheus_is_told_while_pods_are_read_directly() -> None:
    """Decisions go on, nothing is lowered, and both changes are told once."""
    loop = Loop()
    loop.steady(10)
    told = []
    for i in range(40):
        direct = [replace(row, source=Source.DIRECT) for row in loop.samples()]
        decision = loop.tick(direct if i < 20 else loop.samples(), prometheus_lost=i < 20)
        told += [event.reason for event in decision.events]
        assert decision.breakers.control.state is BreakerState.CLOSED
        report = reported(loop, decision)
        assert condition(report, ConditionType.METRICS_AVAILABLE)[0] == "True"
        shown = reported_status(report.report)["breaker"]["source"]
        assert shown == ("Open" if LOST_TICKS - 1 <= i < 20 else "Closed")
    assert told == ["PrometheusLost", "PrometheusBack"]


@pytest.mark.parametrize(
    ("spoil", "reason", "message"),
    [
        ("never", Reason.NO_METRICS, "no usable samples"),
        ("stopped", Reason.STALE_METRICS, "older than a minute"),
        ("young", Reason.NO_METRICS, "ready for a minute"),
        ("one of three", Reason.TOO_FEW_REPORT, "Fewer than half"),
        ("none ready", Reason.NO_METRICS, "No replica is ready"),
    ],
)
def test_why_nothing_is_known_is_told_apart(spoil: str, reason: Reason, message: str) -> None:
    """Never came, stopped coming, too early, too few: each has its own remedy."""
    age_s = 5.0 if spoil == "young" else 3600.0
    names = ("chat-0", "chat-1", "chat-2")
    pods = tuple(pod_view(name, age_s=age_s, ready=spoil != "none ready") for name in names)
    loop = Loop(pods=pods, replicas=3)
    if spoil == "stopped":
        loop.steady(6)
    for _ in range(11 if spoil == "young" else 14):
        rows = loop.samples() if spoil in {"young", "one of three"} else []
        decision = loop.tick(rows[:1] if spoil == "one of three" else rows)
    if spoil == "young":
        loop.now = NOW + 50.0
        decision = loop.tick(loop.samples())
    got = condition(reported(loop, decision), ConditionType.METRICS_AVAILABLE)
    assert got[:2] == ("False", reason)
    assert message in got[2]


@pytest.mark.parametrize(
    ("source", "lost", "words"),
    [
        (Source.PROMETHEUS, False, {"from Prometheus"}),
        (Source.DIRECT, False, {"read directly"}),
        (Source.DIRECT, True, {"Prometheus", "read directly", "none is removed"}),
    ],
)
def test_where_signals_come_from_is_told(source: Source, lost: bool, words: set[str]) -> None:
    """In MetricsAvailable."""
    loop = Loop()
    for _ in range(6):
        rows = [replace(row, source=source) for row in loop.samples()]
        decision = loop.tick(rows, prometheus_lost=lost)
    got = condition(reported(loop, decision), ConditionType.METRICS_AVAILABLE)
    assert got[:2] == ("True", Reason.FRESH_METRICS)
    assert all(word in got[2] for word in words)
    assert ("Prometheus" in got[2]) == (lost or source is Source.PROMETHEUS)


def test_one_slow_answer_of_prometheus_is_told_to_nobody() -> None:
    """Two silent ticks are no loss: a thousand services would post a thousand events."""
    loop = Loop()
    loop.steady(10)
    for i in range(30):
        decision = loop.tick(loop.samples(), prometheus_lost=i % 3 != 0)
        assert decision.events == ()


def test_a_lost_prometheus_stays_lost_over_a_restart() -> None:
    """Nobody is told the same twice; the first answer closes it."""
    held = memory_from_status({"breaker": {"control": "Closed", "source": "Open"}}, 1, 80, 1000.0)
    assert held.breakers.source.is_open
    assert (
        decide_source_breaker(held.breakers.source, lost=True, now=1005.0) is held.breakers.source
    )
    assert not decide_source_breaker(held.breakers.source, lost=False, now=1010.0).is_open


def test_an_order_of_replicas_carries_its_reason_and_no_event_of_its_own() -> None:
    """Queue wait 1.9 s, objective 0.5 s, batch at its limit; the event is the planner's, once it has written it."""
    loop = Loop()
    reported(loop, loop.steady(20, batch_time_within=24.5))
    waiting = Gauges(
        running=64,
        waiting_standard=40,
        oldest_wait_s_standard=1.9,
        limit_sequences=32,
        kv_capacity_tokens=4e5,
        kv_resident_tokens=1e5,
    )
    told: list[str] = []
    for _ in range(6):
        decision = loop.tick(loop.samples(gauges=waiting, batch_time_within=24.5))
        report = reported(loop, decision)
        assert not [text for text in report.events if "Replicas" in text.message]
        if report.allocation is not None and report.allocation.replicas > loop.replicas:
            assert report.allocation.reason == "QueueWaitAboveTarget"
            told.append(report.allocation.message)
            loop.replicas = report.allocation.replicas
    assert told[0].startswith("Queue wait")
    assert all(figure in told[0] for figure in ("1.9 s", "0.5 s"))


@pytest.mark.parametrize("seen", [True, False])
def test_a_number_that_was_found_is_not_laid_to_this_decision(seen: bool) -> None:
    """A leader ended between its order of 2 -> 3 and its status: the next one says what it met."""
    before = Loop()
    status = reported_status(reported(before, before.steady(20)).report)
    assert status["scaling"]["desired"] == 2
    loop = Loop(replicas=3, started=NOW)
    loop.memory = memory_from_status(status, 1, 80, loop.now)
    report = reported(loop, loop.tick(loop.samples() if seen else []))
    assert reported_status(report.report)["decisions"][-1] == {
        "time": rfc3339.format(loop.now),
        "what": "replicas",
        "from": "2",
        "to": "3",
        "reason": "ExternallyChanged",
    }
    assert reported_status(report.report)["scaling"]["reason"] == "ExternallyChanged"
    assert "3 replicas" in reported_status(report.report)["scaling"]["message"]
    told = reported_status(report.report)["decisions"]
    for _ in range(3):
        report = reported(loop, loop.tick(loop.samples() if seen else []))
        assert reported_status(report.report)["decisions"] == told
    assert reported_status(report.report)["scaling"]["reason"] == (
        "ExternallyChanged" if seen else "SignalsStale"
    )


def test_an_order_that_is_taken_back_unserved_is_told_as_found() -> None:
    """2 -> 3 was told, but the workload has 2 and nothing is wanted any more."""
    loop = Loop()
    decision = loop.steady(20)
    wanted = replace(decision, replicas=replace(decision.replicas, value=3, valid=True))
    reported(loop, wanted, Allocation(3))
    report = reported(loop, decision, Allocation(2))
    assert [
        (row["from"], row["to"], row["reason"])
        for row in reported_status(report.report)["decisions"]
    ][-1] == (
        "3",
        "2",
        "ExternallyChanged",
    )


def test_the_status_fits_the_published_schema_and_is_quiet() -> None:
    """Every piece parses; an hour of calm changes nothing in it."""
    loop = Loop()
    report = reported(loop, loop.steady(60))
    InferenceServiceStatus.model_validate(report_to_status(report.report))
    first = None
    for _ in range(200):
        status = reported_status(reported(loop, loop.tick(loop.samples())).report)
        first = first or status
        assert status == first


def test_budget_and_bounds_are_named_in_scaling_limited() -> None:
    """Which of them limits."""
    loop = Loop()
    decision = loop.steady(20)
    wanted = replace(decision, replicas=replace(decision.replicas, value=4))
    limited, _ = build_report(
        wanted, Allocation(2, "the fleet's budget of accelerators"), loop.memory, loop.now
    )
    assert condition(limited, ConditionType.SCALING_LIMITED)[:2] == ("True", Reason.GPU_BUDGET)
    assert "2 of 4" in condition(limited, ConditionType.SCALING_LIMITED)[2]
    free, _ = build_report(decision, Allocation(2), loop.memory, loop.now)
    assert condition(free, ConditionType.SCALING_LIMITED)[0] == "False"


def test_missing_metrics_turn_metrics_compatible_false() -> None:
    """And are named."""
    loop = Loop()
    for _ in range(5):
        rows = [replace(row, missing=("fleetkeeper_steps_total",)) for row in loop.samples()]
        decision = loop.tick(rows)
    status, reason, message = condition(reported(loop, decision), ConditionType.METRICS_COMPATIBLE)
    assert (status, reason) == ("False", Reason.METRICS_MISSING)
    assert "fleetkeeper_steps_total" in message


@pytest.mark.parametrize(("peak", "status"), [(0.75, "True"), (0.80, "True"), (0.83, "False")])
def test_memory_above_the_cap_is_told_with_pod_and_share(peak: float, status: str) -> None:
    """From the measured peak."""
    loop = Loop()
    gauges = Gauges(
        running=20, memory_peak_ratio=peak, memory_used_ratio=0.5, kv_capacity_tokens=4e5
    )
    for _ in range(6):
        decision = loop.tick(loop.samples(gauges=gauges))
    got, _, message = condition(reported(loop, decision), ConditionType.MEMORY_WITHIN_CAP)
    assert got == status
    if status == "False":
        assert "chat-" in message
        assert "83%" in message


def test_memory_is_rebuilt_from_the_status() -> None:
    """Limits, breakers, remedy and decisions survive a restart; open breakers are open from now."""
    loop = Loop()
    report = reported(loop, loop.steady(30))
    status = {**reported_status(report.report), "observedGeneration": 1}
    rebuilt = memory_from_status(status, 1, 80, NOW)
    assert rebuilt.batch.limits == loop.memory.batch.limits
    assert rebuilt.changes == loop.memory.changes
    assert rebuilt.shown_scaling == loop.memory.shown_scaling
    assert rebuilt.breakers.control.is_closed
    status["breaker"] = {"control": "HalfOpen", "reason": "Oscillating", "load": {"batch": "Open"}}
    rebuilt = memory_from_status(status, 1, 80, NOW)
    assert rebuilt.breakers.control.state is BreakerState.OPEN
    assert rebuilt.breakers.control.last_good == loop.memory.batch.limits
    assert rebuilt.breakers.load.batch.state is BreakerState.OPEN


@pytest.mark.parametrize(
    ("reason", "message", "cause"),
    [
        ("SignalsLost", "No signals for 3 ticks", "No signals for 3 ticks"),
        ("Overload", "Pressure 1.20 above 0.9", CAUSE_UNKNOWN),
        ("PrometheusLost", "Prometheus returns no fresh samples", CAUSE_UNKNOWN),
    ],
)
def test_the_cause_of_an_open_control_breaker_is_the_one_that_the_status_explains(
    reason: str, message: str, cause: str
) -> None:
    """The status explains the breaker that changed last."""
    breaker = {"control": "Open", "source": "Closed", "reason": reason, "message": message}
    assert memory_from_status({"breaker": breaker}, 1, 80, NOW).breakers.control.detail == cause


def test_a_remedy_survives_a_restart_of_the_operator_not_of_the_spec() -> None:
    """Until the generation changes."""
    loop = Loop(settings=ControlSettings(generation=7))
    loop.memory = replace(loop.memory, remedy=Remedy("CUDAOutOfMemory", 128, 75, 3, 7, NOW))
    status = {**reported_status(reported(loop, loop.steady(3)).report), "observedGeneration": 7}
    assert memory_from_status(status, 7, 80, NOW).remedy == Remedy(
        "CUDAOutOfMemory", 128, 75, 3, 7, NOW
    )
    assert memory_from_status(status, 8, 80, NOW).remedy is None


HOSTILE_STATUS = [
    {},
    {"batching": None},
    {"batching": []},
    {"batching": {"sequences": "many", "tokens": -1}},
    {"breaker": {"control": 7, "load": "x"}},
    {"decisions": [1, None, {"time": 3}]},
    {"scaling": {"since": "yesterday"}},
    {"remedy": {"maxSequences": True}},
    {"memory": {"peakPercent": "x"}},
    {"decisions": {}},
]


@pytest.mark.parametrize("status", HOSTILE_STATUS, ids=str)
def test_a_malformed_status_counts_as_absent(status: dict[str, object]) -> None:
    """Somebody edited it; nothing fails, and the loop runs on it."""
    memory = memory_from_status(status, 1, 80, NOW)
    loop = Loop(memory=memory)
    assert loop.steady(3).replicas.value == 2


def test_times_round_trip() -> None:
    """RFC 3339, whole seconds."""
    assert rfc3339.format(0.0) == "1970-01-01T00:00:00Z"
    assert rfc3339.parse(rfc3339.format(NOW)) == NOW
    assert rfc3339.parse("nonsense") is None


def test_settings_of_a_parsed_service() -> None:
    """Milliseconds and percent become seconds and ratios; a remedy lowers the ceiling."""
    manifest = {
        "apiVersion": "fleetkeeper.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "team-a", "uid": "u", "generation": 4},
        "spec": {
            "model": {"source": "pvc://models/llama"},
            "objectives": {"queueWaitMilliseconds": 250, "attainmentPercent": 90},
        },
    }
    spec = parse_service(manifest).spec
    held = settings_of(spec, 4)
    assert held.queue_wait_objective_s == 0.25
    assert held.attainment_ratio == 0.9
    assert held.scaling_mode is ScalingMode.AUTO
    assert held.max_sequences == 256
    assert settings_of(spec, 4, max_sequences=64, cap_percent=75).max_sequences == 64


def test_young_and_missing_pods_hold_the_number() -> None:
    """A fleet whose pods all just became ready is not judged, and not taken for lost."""
    loop = Loop(pods=(pod_view("chat-0", age_s=5), pod_view("chat-1", age_s=5)))
    for _ in range(10):
        decision = loop.tick(loop.samples())
    assert decision.breakers.control == ControlBreaker() or decision.breakers.control.is_closed
    assert decision.replicas.value == 2


def test_the_memory_is_small() -> None:
    """A day of ticks does not make it grow."""
    loop = Loop()
    loop.steady(100)
    early = memory_size(loop.memory)
    loop.steady(600)
    assert memory_size(loop.memory) <= 1.5 * early


def memory_size(memory: ControlMemory) -> int:
    """Its length in words, as a measure."""
    return len(repr(memory))
