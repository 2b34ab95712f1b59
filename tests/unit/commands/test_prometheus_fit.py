"""The fit of a running service: the counters of simulated engines give their coefficients back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleetkeeper.commands.simulate.prometheus_fit import NoFit, fitted
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_contract.step_terms import StepClass
from fleetkeeper_contract.tiers import TIER_LABELS
from fleetkeeper_steps.costs import StepCosts

COSTS = StepCosts(0.003, 0.004, 4e-5, 2e-5, 5e-8)


def history(pods: int = 2, minutes: int = 30) -> list[dict[str, Any]]:
    """Return the rows of a range query over engines with a changing load."""
    rows: dict[tuple[str, str, str], list[list[Any]]] = {}
    for number in range(pods):
        engine = Engine(EngineSpec(COSTS, step_noise=0.0), f"p{number}", 0.0)
        for minute in range(minutes):
            for request in range(20 + 8 * (minute % 7)):
                at = 60.0 * minute + request
                engine.advance(at)
                assert engine.arrive(Request(at, 1, 200 + 40 * (request % 9), 40 + minute))
            engine.advance(60.0 * minute + 60)
            for name, label, value in series(engine, 60.0 * minute + 60):
                rows.setdefault((f"p{number}", name, label), []).append(
                    [60.0 * minute + 60, str(value)]
                )
    return [
        {"metric": {"__name__": name, "pod": pod, **labels_of(name, label)}, "values": values}
        for (pod, name, label), values in rows.items()
    ]


def labels_of(name: str, label: str) -> dict[str, str]:
    if not label:
        return {}
    return {"step_class" if "step_model" in name else "tier": label}


def series(engine: Engine, now: float) -> Iterator[tuple[str, str, float]]:
    """Yield the series of a scrape that the fit queries: name, tier or class of step, value."""
    sample = engine.sample(now)
    for step_class, sums in zip(StepClass, (sample.decode, sample.prefill), strict=True):
        assert sums is not None
        for term, value in sums._asdict().items():
            yield f"fleetkeeper_step_model_{term}_total", step_class.label, value
    counters = sample.counters._asdict()
    for tier in TIER_LABELS:
        yield "fleetkeeper_queue_wait_seconds_count", str(tier), counters[f"wait_count_{tier}"]
        yield "fleetkeeper_arrivals_total", str(tier), counters[f"arrivals_{tier}"]
    yield "fleetkeeper_prompt_tokens_total", "", counters["prompt_tokens"]
    yield "fleetkeeper_generation_tokens_total", "", counters["generation_tokens"]
    yield "fleetkeeper_kv_capacity_tokens", "", 400_000.0


def test_the_counters_give_coefficients_tokens_rate_and_capacity() -> None:
    found = fitted("team-a/chat", history(), 91.0)
    hardware = found.hardware
    assert (hardware.name, hardware.kv_capacity_tokens, hardware.cold_start_s) == (
        "team-a/chat", 400_000.0, 91.0,
    )  # fmt: skip
    for sequences, kv in ((2.0, 600.0), (8.0, 3000.0)):
        expected = COSTS.t0_s + COSTS.w_s + COSTS.b_s * sequences + COSTS.c_s * kv
        assert hardware.step_time_s(0.0, sequences, kv) == pytest.approx(expected, rel=0.1)
    assert found.prompt_tokens == pytest.approx(355, rel=0.1)
    assert found.output_tokens == pytest.approx(55, rel=0.15)
    assert found.requests_per_s == pytest.approx(2 * 44 / 60, rel=0.1)


def test_a_restart_of_an_engine_is_left_out() -> None:
    rows = history(pods=1)
    for row in rows:
        for point in row["values"][15:]:
            if "capacity" not in row["metric"]["__name__"]:
                point[1] = str(float(point[1]) - float(row["values"][14][1]))
    found = fitted("a/b", rows, None)
    assert found.output_tokens == pytest.approx(55, rel=0.15)
    assert found.hardware.step_time_s(0.0, 2.0, 600.0) == pytest.approx(0.00707, rel=0.1)


def test_too_few_steps_and_no_requests_say_so() -> None:
    with pytest.raises(NoFit, match="a/b: no request"):
        fitted("a/b", [], None)
    with pytest.raises(NoFit, match="at least"):
        fitted("a/b", history(pods=1, minutes=2), None)
