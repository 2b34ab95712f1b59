"""Comparisons: the same seed gives the same figures and the same requests; alternatives do what their name says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate import comparison
from fleetkeeper.simulate.arguments import Alternative, parse_alternatives, parse_faults
from fleetkeeper.simulate.closed_loop import Scenario
from fleetkeeper.simulate.comparison import (
    Case,
    Result,
    Setting,
    Spread,
    compare,
    compare_together,
    scenario_of,
    smallest_fixed,
    spread,
)
from fleetkeeper.simulate.loads.arrivals import Mix, poisson, retiered, trace
from fleetkeeper.simulate.outcome import Outcome, TierOutcome
from fleetkeeper.simulate.recorder import Moment, moment_s
from fleetkeeper.simulate.service_model import ServiceModel, UnfitService, engine_spec, model_of
from fleetkeeper_steps.costs import StepCosts
from fleetkeeper_steps.hardware import Hardware, known_hardware

MIX = Mix(300, 60, (0.3, 0.4, 0.3))
SPEC: Mapping[str, Any] = {
    "model": {"source": "pvc://models/m"},
    "scaling": {"minReplicas": 2, "maxReplicas": 4},
    "rollout": {"drainSeconds": 77},
}
WALL = ("engine_cpu_s", "control_cpu_s")


def model(hardware: Hardware | None = None, gpus: int = 1, **more: Any) -> ServiceModel:
    spec = InferenceServiceSpec.model_validate({**SPEC, **more})
    return model_of(spec, 1, hardware or known_hardware()["h100-8b"], gpus)


def setting(seconds: float = 90.0, rate: float = 4.0, **more: Any) -> Setting:
    return Setting(poisson(lambda _: rate, rate, MIX), seconds, **{"seeds": 2, **more})


def alternative(text: str) -> Alternative:
    (one,) = parse_alternatives(text)
    return one


def without_cpu(result: Result) -> dict[str, Spread]:
    return {name: value for name, value in result.figures.items() if name not in WALL}


def test_the_same_options_give_the_same_report() -> None:
    cases = [Case(model()), Case(model(), alternative("hpa-concurrency:4"))]
    first, second = compare(cases, setting()), compare(cases, setting())
    assert [without_cpu(a) for a in first] == [without_cpu(b) for b in second]
    assert [str(a.moments) for a in first] == [str(b.moments) for b in second]


def test_a_seed_gives_every_case_the_same_requests() -> None:
    cases = [
        Case(model()),
        *(Case(model(), one) for one in parse_alternatives("static:3,advisory")),
    ]
    results = compare(cases, setting())
    assert len({result.figures["requests"] for result in results}) == 1
    assert results[0].figures["requests"].least < results[0].figures["requests"].most
    per_tier = [{tier: row["requests"] for tier, row in result.tiers.items()} for result in results]
    assert per_tier[0] == per_tier[1] == per_tier[2]
    assert all(row.median > 0 for row in per_tier[0].values())


def test_stock_engines_have_no_tiers_no_queue_limits_and_their_own_token_budget() -> None:
    stock = scenario_of(Case(model(), alternative("static:3@512")), setting(), 1)
    assert (stock.engine.queue_limits, stock.engine.max_tokens, stock.replicas) == (None, 512, 3)
    requests = stock.load(Random(1))
    assert {next(requests).tier for _ in range(50)} == {1}
    ours = scenario_of(Case(model(tiers={"batch": {"queueLimit": 9}})), setting(), 1)
    assert (ours.engine.queue_limits, ours.engine.max_tokens, ours.replicas) == (
        (64, 256, 9), 8192, 2,
    )  # fmt: skip
    requests = ours.load(Random(1))
    assert {next(requests).tier for _ in range(50)} == {0, 1, 2}


def test_advisory_computes_and_changes_nothing() -> None:
    tight = model(objectives={"queueWaitMilliseconds": 10, "batchTimeMilliseconds": 10})
    case = Case(tight, alternative("advisory@1024"))
    (result,) = compare([case], setting(240.0, 20.0, seeds=1))
    assert {moment.limit_sequences for moment in result.moments} == {256.0}
    assert {moment.limit_tokens for moment in result.moments} == {1024.0}
    assert {moment.replicas for moment in result.moments} == {2}
    assert result.figures["control_cpu_s"].median > 0


def test_an_hpa_scales_to_its_target_and_not_without_metrics() -> None:
    case = Case(model(), alternative("hpa-concurrency:1"))
    (with_metrics,) = compare([case], setting(120.0, 12.0, seeds=1))
    assert with_metrics.figures["most_replicas"].median == 4
    blind = setting(120.0, 12.0, seeds=1, faults=parse_faults(["metrics:0-200"]))
    (without,) = compare([case], blind)
    assert without.figures["most_replicas"].median == 2


def test_faults_reach_the_cluster() -> None:
    faults = parse_faults(["crash:30", "gpus:0-200"])
    case = Case(model(), alternative("hpa-concurrency:1"))
    (result,) = compare([case], setting(120.0, 12.0, seeds=1, faults=faults))
    assert result.figures["most_replicas"].median == 4
    assert max(moment.ready for moment in result.moments) == 2
    assert min(moment.ready for moment in result.moments) == 1


def test_the_time_line_has_one_row_per_quarter_of_a_minute_or_fewer() -> None:
    assert [moment_s(seconds) for seconds in (90.0, 5400.0, 86_400.0)] == [15.0, 15.0, 240.0]
    (result,) = compare([Case(model())], setting(seeds=1))
    assert [moment.time_s for moment in result.moments] == [15.0 * n for n in range(7)]
    assert math.isnan(result.moments[0].queue_wait_s)
    assert result.moments[0].as_json()["queue_wait_s"] is None
    assert result.moments[-1].requests_per_s > 0
    assert isinstance(result.moments[-1], Moment)


def test_the_time_line_counts_a_request_once_however_often_it_is_sent() -> None:
    """Full engines refuse most of them, each several times."""
    tight = model(tiers={"standard": {"queueLimit": 1}, "batch": {"queueLimit": 1}})
    (result,) = compare([Case(tight, alternative("advisory"))], setting(90.0, 300.0, seeds=1))
    assert result.figures["refused"].median > 0.2 * result.figures["requests"].median
    assert sum(15.0 * moment.requests_per_s for moment in result.moments) == pytest.approx(
        result.figures["requests"].median, abs=5
    )


def test_a_service_has_its_routers() -> None:
    for replicas in (1, 5):
        case = Case(model(routing={"replicas": replicas}))
        assert scenario_of(case, setting(), 1).routers == replicas


def test_what_ifs_have_a_name_and_their_own_service() -> None:
    less = model(scaling={"minReplicas": 1, "maxReplicas": 1})
    case = Case(less, what_if="scaling.maxReplicas=1")
    assert case.name == "fleetkeeper scaling.maxReplicas=1"
    (base, other) = compare([Case(model()), case], setting(seeds=1))
    assert other.figures["replica_hours"].median < base.figures["replica_hours"].median


def test_progress_names_the_case_the_seed_and_the_time() -> None:
    seen: list[tuple[str, int, float]] = []
    compare([Case(model())], setting(), lambda case, seed, now: seen.append((case.name, seed, now)))
    assert seen[-1] == ("fleetkeeper", 2, 90.0)
    assert [row[2] for row in seen] == [0.0, 60.0, 90.0] * 2


def test_the_spread_ignores_unknown_values() -> None:
    assert spread([3.0, 1.0, math.nan, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert all(math.isnan(value) for value in spread([math.nan]))


def test_tiers_can_be_drawn_for_a_trace() -> None:
    load = retiered(trace([(float(n), 1, 1, 1) for n in range(100)]), (0.5, 0.0, 0.5))
    tiers = [request.tier for request in load(Random(1))]
    assert set(tiers) == {0, 2}
    assert tiers == [request.tier for request in load(Random(1))]


def test_the_engine_of_a_service_has_the_overheads_and_the_spec_in_it() -> None:
    hardware = Hardware(
        "x", "m", "s", 1, "bf16", 0.002, 0.004, 2e-5, 5e-6, 4e-8, 3e-9, 10_000.0,
        step_overhead_s=0.001, sequence_overhead_s=1e-6, request_overhead_s=0.01, kernel_ratio=2.0,
    )  # fmt: skip
    spec = InferenceServiceSpec.model_validate(
        {**SPEC, "batching": {"maxSequences": 32, "maxTokens": 2048}}
    )
    engine = engine_spec(hardware, spec)
    expected = StepCosts(0.005, 0.008, 4e-5, 1.1e-5, 8e-8, 6e-9, 0.01)
    assert tuple(engine.costs) == pytest.approx(tuple(expected))
    assert (engine.max_sequences, engine.max_tokens, engine.kv_capacity_tokens) == (32, 2048, 1e4)
    assert model().drain_s == 77.0


@pytest.mark.parametrize(
    ("more", "gpus", "path", "words"),
    [
        ({"replicas": 3}, 1, "spec.replicas", ("pins", "static:3")),
        ({}, 4, "spec.resources.accelerator", ("4 accelerators", "runs on 1")),
        ({"engine": {"maxModelLength": 500_000}}, 1, "spec.engine.maxModelLength", ("400000",)),
        (
            {"objectives": {"batchTimeMilliseconds": 5}},
            1,
            "spec.objectives.batchTimeMilliseconds",
            ("is 5", "cannot do that", "floor 7.", "Llama-3.1-8B on h100-8b"),
        ),
    ],
)
def test_a_service_that_does_not_fit_names_the_field(
    more: Mapping[str, Any], gpus: int, path: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UnfitService) as caught:
        model(gpus=gpus, **more)
    assert caught.value.error.path == path
    for word in words:
        assert word in str(caught.value)


def test_modes_that_stop_fleetkeeper_are_noted() -> None:
    notes = model(
        paused=True,
        scaling={"mode": "Advisory"},
        batching={"mode": "Fixed"},
        routing={"policy": "RoundRobin"},
    ).notes
    assert [note.split(" ")[0] for note in notes] == [
        "spec.paused", "scaling.mode", "batching.mode", "routing.policy",
    ]  # fmt: skip
    assert model().notes == ()


def test_the_start_is_that_of_every_alternative_but_a_fixed_fleet() -> None:
    start = setting(start=3)
    for text, replicas in (("hpa-waiting:1", 3), ("advisory", 3), ("static:2", 2)):
        assert scenario_of(Case(model(), alternative(text)), start, 1).replicas == replicas
    assert scenario_of(Case(model()), start, 1).replicas == 3
    assert scenario_of(Case(model()), setting(), 1).replicas == 2


def test_a_result_has_each_change_of_replicas_and_each_opened_breaker_with_its_rule() -> None:
    faults = parse_faults(["metrics:60-200"])
    (result,) = compare([Case(model())], setting(120.0, 300.0, seeds=1, faults=faults))
    changes = [each for each in result.decided if each.subject == "replicas"]
    assert len(changes) == result.figures["replica_changes"].median > 0
    assert [each.before for each in changes] == ["2", *(each.after for each in changes[:-1])]
    assert all(each.reason and each.message for each in changes)
    openings = [each for each in result.decided if each not in changes]
    assert {each.subject for each in openings} == {"breaker"}
    assert all(each.after.endswith(" Open") for each in openings)
    (lost,) = [each for each in openings if each.reason == "PrometheusLost"]
    assert (lost.before, lost.after) == ("source Closed", "source Open")
    assert 60 < lost.time_s <= 90
    assert "directly" in lost.message


def test_a_fixed_fleet_has_no_decisions() -> None:
    (result,) = compare([Case(model(), alternative("static:2"))], setting(seeds=1))
    assert result.decided == ()


@pytest.mark.parametrize(("most", "guess"), [(40, 3), (40, 30), (5, 9), (5, 1)])
def test_the_smallest_fixed_fleet_is_found_by_bisection(
    most: int, guess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number is played at most once, on seed 1, with the engines of static:N."""
    played: list[int] = []
    seen: list[str] = []

    def attained(scenario: Scenario, progress: Callable[[float], None]) -> tuple[Outcome, None]:
        assert (scenario.seed, scenario.engine.queue_limits) == (1, None)
        played.append(scenario.replicas)
        progress(7.0)
        good = 95 if scenario.replicas >= 5 else 94
        standard = TierOutcome(arrived=100, good=good)
        return Outcome(tiers=(TierOutcome(), standard, TierOutcome()), arrivals=100), None

    monkeypatch.setattr(comparison, "run", attained)
    service = Case(model(scaling={"minReplicas": 1, "maxReplicas": most}))
    found = smallest_fixed(service, setting(), guess, lambda case, *_: seen.append(case.name))
    assert found == Case(service.model, alternative("static:5"))
    assert len(set(played)) == len(played) <= 8
    assert max(played) <= most
    assert seen == [f"static:{number}" for number in played]
    less = Case(model(scaling={"minReplicas": 1, "maxReplicas": 4}))
    played.clear()
    assert smallest_fixed(less, setting(), guess) is None
    assert max(played) == 4


def two_services(*texts: str, **more: Any) -> tuple[tuple[Result, ...], ...]:
    """Play two services that need more than the three accelerators of their budget."""
    cases = [Case(model()), *(Case(model(), alternative(text)) for text in texts)]
    services = [
        (cases, setting(240.0, 200.0, service=("team-a", name), number=number, share=1, **more))
        for number, name in enumerate(("chat", "code"))
    ]
    return tuple(compare_together(services, Budget(5)))


def test_services_share_a_budget_and_its_limit_is_a_decision() -> None:
    chat, code = two_services("hpa-concurrency:1", seeds=1)
    for row, (one, other) in enumerate(zip(chat, code, strict=True)):
        pairs = zip(one.moments, other.moments, strict=True)
        most = max(a.replicas + b.replicas for a, b in pairs)
        assert (one.name, most) == (("fleetkeeper", 5), ("hpa-concurrency:1", 4))[row]
    limits = [each for each in chat[0].decided + code[0].decided if each.subject == "budget"]
    assert limits
    for each in limits:
        assert each.reason == "GPUBudget"
        assert (
            each.message
            == f"The fleet's budget of 5 GPUs allows {each.after} of {each.before} replicas"
        )
        assert int(each.after) < int(each.before)


def test_each_service_has_requests_of_its_own_and_the_first_those_that_it_has_alone() -> None:
    chat, code = two_services(seeds=2)
    alone = compare([Case(model(), alternative("static:1"))], setting(240.0, 200.0))[0]
    assert chat[0].figures["requests"] == alone.figures["requests"]
    assert code[0].figures["requests"] != alone.figures["requests"]


def test_an_hpa_has_at_most_its_share_of_the_budget_and_at_least_its_minimum() -> None:
    """A minimum of two and a maximum of four."""
    for share, most in ((1, 2), (3, 3), (9, 4), (None, 4)):
        case = Case(model(), alternative("hpa-concurrency:1"))
        (result,) = compare([case], setting(60.0, 30.0, seeds=1, share=share))
        assert result.figures["most_replicas"].median == most
