"""One service, tick by tick: modes, breakers and missing data."""

from __future__ import annotations

import pytest

from fleetkeeper.api.conditions import ConditionType, Reason
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.api.types import BatchingMode, ScalingMode
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.signals.samples import Gauges
from fleetkeeper.autoscale.types import ControlSettings, Limits, PutOutcome
from fleetkeeper.common.activation import SCALED, Activation, State
from tests.support.autoscale.control_cases import Loop, condition, reported, reported_status


def test_same_inputs_same_answer() -> None:
    """Decisions are pure."""
    one, two = Loop(), Loop()
    assert one.steady(20) == two.steady(20)
    assert one.memory == two.memory


def test_nothing_is_known_at_first_and_nothing_changes() -> None:
    """No sample yet: no zero, no change."""
    decision = Loop().tick()
    assert not decision.replicas.valid
    assert decision.replicas.value == 2
    assert decision.puts == () or all(put.limits == decision.in_force for put in decision.puts)


def test_a_calm_service_is_left_alone() -> None:
    """An hour of steady load within the objectives: no change of replicas, one limits request a pod, then lease renewals."""
    loop = Loop(settings=ControlSettings(min_replicas=2))
    puts = 0
    for _ in range(720):
        decision = loop.tick(loop.samples(), put_outcomes=())
        puts += len(decision.puts)
        assert decision.replicas.value == 2
    assert puts <= 2 * (3600 / 60 + 3)


@pytest.mark.parametrize(
    ("mode", "pinned", "paused"),
    [
        (ScalingMode.ADVISORY, None, False),
        (ScalingMode.EXTERNAL, 2, False),
        (ScalingMode.AUTO, 3, False),
        (ScalingMode.AUTO, None, True),
    ],
)
def test_modes_that_do_not_act_allocate_nothing(
    mode: ScalingMode, pinned: int | None, paused: bool
) -> None:
    """Computed and reported, nothing done."""
    activation = SCALED if pinned is None else Activation(State.PINNED, pinned)
    settings = ControlSettings(scaling_mode=mode, activation=activation, paused=paused)
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
    running=60,
    waiting_standard=90,
    waiting_batch=10,
    oldest_wait_s_standard=9.0,
    kv_capacity_tokens=4e5,
)


def test_fixed_sends_the_start_up_limits_at_once() -> None:
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
    """It is computed and reported, nothing is sent to an engine, and the service is not degraded."""
    loop = Loop(settings=ControlSettings(batching_mode=BatchingMode.ADVISORY))
    loop.steady(10)
    recorded: list[str] = []
    for _ in range(20):
        decision = loop.tick(loop.samples(gauges=OVERLOADED))
        recorded += [event.message for event in decision.events]
        assert decision.puts == ()
        assert decision.admission.admit == (1.0, 1.0, 1.0)
    report = reported(loop, decision)
    assert reported_status(report.report)["breaker"]["load"]["batch"] == "Open"
    assert condition(report, ConditionType.DEGRADED)[0] == "False"
    assert any("batch would shed" in text for text in recorded)
    assert not any("sheds" in text for text in recorded)


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
    before = loop.tick(loop.samples()).in_force
    for _ in range(30):
        decision = loop.tick()
    assert decision.breakers.control.state is BreakerState.OPEN
    assert decision.in_force == before
    assert decision.admission.admit == (1.0, 1.0, 1.0)


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
    settings = settings_of(spec, 4)
    assert settings.queue_wait_objective_s == 0.25
    assert settings.attainment_ratio == 0.9
    assert settings.scaling_mode is ScalingMode.AUTO
    assert settings.max_sequences == 256
    assert settings_of(spec, 4, max_sequences=64, cap_percent=75).max_sequences == 64
