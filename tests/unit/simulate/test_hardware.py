"""Hardware: the fits of the package, one's own file, and a running service's step times."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import resources
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.capacity.step_time_model import StepModel
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.simulate.hardware import fit_of_sums, model_of_sums, parse_hardware
from fleetkeeper_contract.step_terms import StepSums
from fleetkeeper_steps.hardware import Hardware, InvalidHardware, floor_s, known_hardware

OWN: dict[str, Any] = {
    "name": "mine",
    "t0_s": 0.002,
    "w_s": 0.004,
    "g_s": 2e-5,
    "b_s": 5e-6,
    "c_s": 4e-8,
    "q_s": 1e-9,
    "kv_capacity_tokens": 100_000,
}


def test_the_package_has_every_fitted_hardware_sorted_and_rounded() -> None:
    text = (resources.files("fleetkeeper_steps") / "hardware.json").read_text()
    entries: dict[str, dict[str, Any]] = json.loads(text)
    assert list(entries) == sorted(entries)
    bf16 = {f"{gpu}-{size}" for gpu in ("a100", "h100", "h200") for size in ("8b", "32b", "70b")}
    assert set(entries) == bf16 | {"h100-70b-fp8", "h200-70b-fp8"}
    for entry in entries.values():
        assert list(entry) == sorted(entry)
        for value in entry.values():
            assert not isinstance(value, float) or value == float(f"{value:.6g}")


@pytest.mark.parametrize("name", known_hardware())
def test_every_fit_has_a_small_error_a_source_and_plausible_coefficients(name: str) -> None:
    hardware = known_hardware()[name]
    assert hardware.name == name
    assert parse_hardware(name) == hardware
    assert 0.0 < hardware.median_error_ratio <= 0.05
    assert "aiconfigurator" in hardware.source
    assert hardware.weights
    assert 1e-3 < floor_s(hardware) < 0.05
    assert 10 < hardware.w_s / hardware.g_s < 500, "the knee in tokens"
    assert 1e5 < hardware.kv_capacity_tokens < 1e6
    assert 60.0 < hardware.cold_start_s < 240.0


def test_a_newer_gpu_and_a_smaller_model_are_faster() -> None:
    known = known_hardware()
    assert floor_s(known["h100-8b"]) < floor_s(known["a100-8b"])
    assert floor_s(known["h100-8b"]) < floor_s(known["h100-32b"]) < floor_s(known["h100-70b"])


# Windows of one engine on an H200 (benchmarks/gpu/RESULTS.md, second measurement): means of a step.
WINDOWS = [
    # prefill tokens, decoding, KV tokens, requests that start, prompt, measured ms
    (0.0, 128.0, 43_209, 0.0, 64, 7.80),
    (0.0, 32.0, 267_896, 0.0, 8192, 13.31),
    (4.0, 7.7, 1126, 0.063, 64, 5.36),
    (16.1, 124.7, 11_732, 1.005, 16, 15.95),
    (63.6, 124.6, 17_790, 0.996, 64, 14.50),
    (132.1, 248.7, 35_605, 2.079, 64, 22.34),
    (518.2, 124.6, 73_062, 0.865, 512, 21.03),
    (1991.3, 57.7, 121_623, 0.973, 2048, 55.25),
    (8174.5, 18.9, 159_911, 1.0, 8192, 223.37),
]


@pytest.mark.parametrize("row", WINDOWS)
def test_the_8b_fit_agrees_with_an_engine_on_a_gpu(row: tuple[float, ...]) -> None:
    """Within a fifth, with many short prompts, too."""
    prefill, decoding, kv, starts, prompt, measured_ms = row
    fit = known_hardware()["h200-8b"]
    step_ms = 1e3 * fit.step_time_s(prefill, decoding, kv, prefill * prompt / 2, starts)
    assert step_ms == pytest.approx(measured_ms, rel=0.2)


def test_the_floor_is_one_sequence_without_prefill() -> None:
    hardware = parse_hardware(json.dumps({**OWN, "kernel_ratio": 1.0}))
    assert floor_s(hardware) == pytest.approx(0.002 + 0.004 + 5e-6 + 126e-6 + 4.4e-6)


def test_kernels_and_overheads_are_kept_apart() -> None:
    hardware = parse_hardware(json.dumps(OWN))
    content = (512.0, 10.0, 5000.0, 131_072.0)
    kernels = 0.002 + 2e-5 * 522 + 5e-6 * 10 + 4e-8 * 5000 + 1e-9 * 131_072
    assert hardware.kernel_time_s(*content) == pytest.approx(kernels)
    overhead = 126e-6 + 4.4e-6 * 10 + 2 * 15.6e-3
    assert hardware.step_time_s(*content, admitted=2) == pytest.approx(1.1 * kernels + overhead)


@pytest.mark.parametrize("prefill", [0, 300])
def test_the_simulated_engine_uses_the_same_step_times(prefill: int) -> None:
    hardware = known_hardware()["h200-70b-fp8"]
    pairs = prefill * prefill / 2
    costs = hardware.costs
    step_s = (
        costs.t0_s
        + max(costs.w_s, costs.g_s * (prefill + 8))
        + costs.b_s * 8
        + costs.c_s * 5000
        + costs.q_s * pairs
        + costs.request_s * 3
    )
    assert step_s == pytest.approx(hardware.step_time_s(prefill, 8, 5000, pairs, admitted=3))


AMOUNTS = st.tuples(
    st.floats(0, 16_384),
    st.floats(0, 1024),
    st.floats(0, 1e6),
    st.floats(0, 1e8),
    st.floats(0, 64),
)


@given(name=st.sampled_from(list(known_hardware())), content=AMOUNTS, more=AMOUNTS)
def test_a_step_with_more_of_anything_takes_no_less_time(
    name: str, content: tuple[float, ...], more: tuple[float, ...]
) -> None:
    hardware = known_hardware()[name]
    time_s = hardware.step_time_s(*content)
    assert time_s > 0
    for index, extra in enumerate(more):
        larger = [*content]
        larger[index] += extra
        assert hardware.step_time_s(*larger) >= time_s


def test_a_file_gives_own_coefficients_as_json_or_yaml() -> None:
    yaml_text = "\n".join(f"{key}: {value}" for key, value in OWN.items())
    from_json = parse_hardware(json.dumps(OWN))
    assert from_json.q_s == 1e-9
    assert "g_s: 2e-05" in yaml_text, "a number that YAML reads as a text"
    assert parse_hardware(yaml_text) == from_json


def test_a_description_is_parsed_back() -> None:
    for hardware in known_hardware().values():
        assert parse_hardware(json.dumps(asdict(hardware))) == hardware


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidHardware) as raised:
        parse_hardware("h300-8b")
    assert "h300-8b" in str(raised.value)
    for name in known_hardware():
        assert name in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("t0_s", -0.001),
        ("w_s", "fast"),
        ("g_s", None),
        ("c_s", float("nan")),
        ("q_s", float("inf")),
        ("b_s", True),
        ("kv_capacity_tokens", 0),
        ("kernel_ratio", 0),
        ("gpus", 1.5),
        ("gpus", 0),
        ("cold_start_s", [75]),
        ("model", 8),
        ("name", None),
        ("t0_ms", 2),
    ],
)
def test_an_error_names_the_wrong_field(field: str, value: object) -> None:
    with pytest.raises(InvalidHardware, match=rf"\b{field}\b"):
        parse_hardware(json.dumps({**OWN, field: value}))


@pytest.mark.parametrize("field", [key for key in OWN if key != "name"])
def test_an_error_names_the_missing_field(field: str) -> None:
    with pytest.raises(InvalidHardware, match=rf"add the field {field}\."):
        parse_hardware(json.dumps({key: value for key, value in OWN.items() if key != field}))


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "3"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(InvalidHardware, match="hardware file"):
        parse_hardware(text)


def test_a_step_without_any_cost_is_refused() -> None:
    names = ("t0_s", "w_s", "g_s", "b_s", "step_overhead_s", "sequence_overhead_s")
    with pytest.raises(InvalidHardware, match="t0_s or w_s"):
        parse_hardware(json.dumps({**OWN, **dict.fromkeys(names, 0)}))


def _sums(hardware: Hardware, random: Random, *, prefill: bool, admitted: float = 0.0) -> StepSums:
    """Return the sums of 200 steps of this hardware, each term the product of its parts."""
    total = dict.fromkeys(StepSums._fields, 0.0)
    for _ in range(200):
        step = {
            "prefill": random.uniform(300, 4000) if prefill else 0.0,
            "sequences": float(random.randint(1, 128)),
            "kv": random.uniform(1e3, 2e5),
        }
        step["seconds"] = hardware.step_time_s(
            step["prefill"], step["sequences"], step["kv"], admitted=admitted
        )
        for name in StepSums._fields:
            first, _, second = name.partition("_")
            total[name] += 1.0 if name == "steps" else step[first] * step.get(second, 1.0)
    return StepSums(**total)


def _windows(hardware: Hardware, count: int, admitted: float = 0.0) -> list[Window]:
    """Return windows of steps. `admitted`: requests that start in each step with prefill."""
    random = Random(7)
    return [
        Window(
            start=10.0 * number,
            end=10.0 * number + 10,
            decode=_sums(hardware, random, prefill=False),
            prefill=_sums(hardware, random, prefill=True, admitted=admitted),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("name", ["h100-8b", "h100-32b", "h200-70b"])
def test_the_sums_of_a_service_give_its_coefficients_back(name: str) -> None:
    bare = {
        "q_s": 0.0,
        "kernel_ratio": 1.0,
        "step_overhead_s": 0.0,
        "sequence_overhead_s": 0.0,
        "request_overhead_s": 0.0,
    }
    truth = replace(known_hardware()[name], **bare)  # type: ignore[arg-type]
    fitted = fit_of_sums(model_of_sums(_windows(truth, 20)), kv_capacity_tokens=1e5)
    assert fitted.kv_capacity_tokens == 1e5
    for field in ("t0_s", "w_s", "g_s", "b_s", "c_s"):
        assert getattr(fitted, field) == pytest.approx(getattr(truth, field), rel=0.02), field


def test_measured_times_contain_the_overheads() -> None:
    """The fit of a service with overheads predicts its steps, and adds no overhead again."""
    truth = replace(known_hardware()["h100-8b"], q_s=0.0)
    fitted = fit_of_sums(model_of_sums(_windows(truth, 20)), kv_capacity_tokens=1e5)
    for content in ((0.0, 1.0, 1e3), (0.0, 100.0, 1e5), (2000.0, 60.0, 5e4)):
        assert fitted.step_time_s(*content) == pytest.approx(truth.step_time_s(*content), rel=0.02)


@pytest.mark.parametrize("name", ["h100-8b", "h100-32b", "h100-70b"])
def test_a_fit_keeps_the_time_of_a_request_that_starts(name: str) -> None:
    """A step with prefill takes longer than its tokens. Steps without are not changed by that."""
    truth = replace(known_hardware()[name], q_s=0.0)
    fitted = fit_of_sums(model_of_sums(_windows(truth, 20, admitted=1.0)), kv_capacity_tokens=1e5)
    assert fitted.request_overhead_s > 0.0
    for content in ((0.0, 1.0, 1e3), (0.0, 128.0, 1e5)):
        assert fitted.step_time_s(*content) == pytest.approx(truth.step_time_s(*content), rel=0.02)
    for content in ((300.0, 10.0, 1e4), (2000.0, 60.0, 5e4)):
        assert fitted.step_time_s(*content, admitted=1.0) == pytest.approx(
            truth.step_time_s(*content, admitted=1.0), rel=0.02
        )


def test_a_fit_needs_steps_of_both_kinds() -> None:
    truth = known_hardware()["h100-8b"]
    (window,) = _windows(truth, 1)
    for model, kind in (
        (StepModel(), "decode-only"),
        (model_of_sums([replace(window, prefill=StepSums())]), "prefill"),
    ):
        with pytest.raises(InvalidHardware, match=f"0 {kind} steps"):
            fit_of_sums(model, kv_capacity_tokens=1e5)
