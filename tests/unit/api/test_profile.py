"""Engine profiles, effective resources, conditions and quantities."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleetkeeper.api.conditions import (
    NOT_READY_REASONS,
    ONLY_WHEN_TRUE,
    ConditionType,
    Reason,
)
from fleetkeeper.api.profiles.errors import profile_errors
from fleetkeeper.api.profiles.profile import (
    AcceleratorKind,
    EffectiveResources,
    EngineProfile,
    ProfileCatalog,
    UnknownProfile,
    effective_resources,
)
from fleetkeeper.api.types import Accelerator, InferenceServiceSpec
from fleetkeeper.api.values.quantity import BadQuantity, canonical_quantity, parse_quantity
from tests.support.lanes import examples


def profile(**change: Any) -> EngineProfile:
    values = {
        "name": "cuda-0.32.0-1",
        "accelerator": "cuda",
        "vllmVersion": "0.32.0",
        "delivery": "inject",
        "image": "vllm/vllm-openai:v0.32.0",
        "injectedImage": "registry.example.com:5000/fleetkeeper-engine:0.1.0",
        **change,
    }
    return EngineProfile.model_validate({k: v for k, v in values.items() if v is not None})


CPU = {"name": "cpu-0.32.0-1", "accelerator": "cpu", "delivery": "baked", "injectedImage": None}


def spec(**parts: Any) -> InferenceServiceSpec:
    return InferenceServiceSpec.model_validate({"model": {"source": "pvc://m/x"}, **parts})


def test_an_alias_and_an_exact_name_find_the_same_profile() -> None:
    one = profile()
    catalog = ProfileCatalog(profiles=(one, profile(**CPU)), aliases={"cuda": one.name})
    assert catalog.resolve("cuda") is catalog.resolve("cuda-0.32.0-1") is one


def test_an_unknown_profile_is_reported_with_the_known_ones() -> None:
    catalog = ProfileCatalog(profiles=(profile(),), aliases={"cuda": "cuda-0.32.0-1"})
    with pytest.raises(UnknownProfile, match=r"'rocm'.*: cuda, cuda-0\.32\.0-1"):
        catalog.resolve("rocm")
    with pytest.raises(UnknownProfile, match="none"):
        ProfileCatalog().resolve("cuda")


@pytest.mark.parametrize(
    ("profiles", "aliases", "words"),
    [
        ((profile(), profile()), {}, "duplicate profiles: cuda-0.32.0-1"),
        ((profile(),), {"cuda": "cuda-0.33.0-1"}, "'cuda' points to 'cuda-0.33.0-1'"),
        ((profile(),), {"cuda-0.32.0-1": "cuda-0.32.0-1"}, "also the name"),
    ],
)
def test_a_catalog_that_does_not_hold_together_is_refused(
    profiles: tuple[EngineProfile, ...], aliases: dict[str, str], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        ProfileCatalog(profiles=profiles, aliases=aliases)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "cuda"}, "KIND-VLLM_VERSION-NUMBER"),
        ({"injectedImage": None}, "requires injectedImage"),
        ({"delivery": "baked"}, "injectedImage"),
        ({"contract": 9}, "engine contract 9"),
        ({"image": "a b"}, "match"),
        ({"image": "--privileged"}, "match"),
        ({"env": ("a=b",)}, "match"),
        ({"vllmVersion": "latest"}, "match"),
    ],
)
def test_a_profile_that_could_not_run_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        profile(**change)


def test_environment_is_allowed_by_name_or_by_beginning() -> None:
    one = profile(env=("HF_HOME", "NCCL_*"))
    allowed = [name for name in ("HF_HOME", "HF_HOME2", "NCCL_", "NCCL_DEBUG", "XNCCL_A") if one.allows_env(name)]  # fmt: skip
    assert allowed == ["HF_HOME", "NCCL_DEBUG"]


def test_what_the_spec_leaves_open_the_profile_fills_in() -> None:
    assert effective_resources(spec(engine={"tensorParallelSize": 4}), profile()) == (
        EffectiveResources("4", "32Gi", "2Gi", Accelerator(resource="nvidia.com/gpu", count=4))
    )
    cpu = effective_resources(spec(), profile(**CPU, resources={"cpu": "8", "memory": "16Gi"}))
    assert (cpu.cpu, cpu.memory, cpu.accelerator, cpu.accelerators) == ("8", "16Gi", None, 0)


def test_quantities_of_the_spec_come_out_canonical() -> None:
    asked = spec(resources={"cpu": "0.5", "memory": "4096Mi", "sharedMemory": "1024Mi"})
    resources = effective_resources(asked, profile())
    assert (resources.cpu, resources.memory, resources.shared_memory) == ("500m", "4Gi", "1Gi")


def test_a_small_memory_gets_a_shared_memory_that_fits_into_it() -> None:
    resources = effective_resources(spec(resources={"memory": "2Gi"}), profile())
    assert resources.shared_memory == "536870912"
    assert profile_errors(spec(resources={"memory": "2Gi"}), profile()) == []


def test_everything_that_a_profile_does_not_support_is_reported_at_once() -> None:
    asked = spec(
        engine={
            "tensorParallelSize": 2,
            "env": [{"name": "NEW", "value": "x"}],
            "options": {"seed": "1"},
        },
        resources={"accelerator": {"count": 2}, "sharedMemory": "32Gi"},
    )
    paths = [error.path for error in profile_errors(asked, profile(**CPU, options=("block-size",)))]
    assert paths == [
        "spec.engine.options.seed",
        "spec.engine.env[0].name",
        "spec.resources.sharedMemory",
        "spec.resources.accelerator",
        "spec.engine.tensorParallelSize",
    ]
    assert profile_errors(spec(), profile()) == profile_errors(spec(), profile(**CPU)) == []
    assert profile().accelerator is AcceleratorKind.CUDA


def test_reasons_are_camel_case_words_with_a_text_each() -> None:
    for word in (*Reason, *ConditionType):
        assert re.fullmatch(r"[A-Z][A-Za-z]{2,60}", word), word
        assert word.text.endswith(".")
        assert len(word.text) <= 120
    assert len({reason.text for reason in Reason}) == len(Reason)


def test_the_reasons_for_not_ready_are_those_of_the_design() -> None:
    assert sorted(NOT_READY_REASONS) == sorted(
        [
            "ImagePull",
            "Unschedulable",
            "InsufficientGPU",
            "ModelNotFound",
            "ModelNotReadable",
            "BadEngineOption",
            "UnsupportedArchitecture",
            "CUDAOutOfMemory",
            "HostOutOfMemory",
            "EngineHung",
            "CrashLoop",
            "QuotaExceeded",
            "AdmissionDenied",
            "NameConflict",
            "MissingSecret",
            "MissingServiceAccount",
            "MissingVolume",
            "ImageVolumesUnsupported",
            "UnknownProfile",
            "CRDTooOld",
            "Stopped",
            "Suspended",
            "Paused",
        ]
    )
    assert {ConditionType.STALLED, ConditionType.RECONCILING} == ONLY_WHEN_TRUE


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", "1"),
        ("1.5Gi", str(3 * 2**29)),
        ("500m", "0.5"),
        ("1e3", "1000"),
        ("-1k", "-1000"),
        ("0.1n", "0.000000001"),
        (".5", "0.5"),
        ("5.", "5"),
    ],
)
def test_a_quantity_has_its_value(text: str, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", " ", "1 Gi", "Gi", "1GB", "1gi", "1K", "0x1", "1e", "--1", "1.2.3", "١", "1Gi\n", "9" * 65]
)  # fmt: skip
def test_what_is_no_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadQuantity, match="such as 32Gi"):
        parse_quantity(text)


NUMBERS = st.decimals(0, 10**9, places=4, allow_nan=False).map(lambda d: f"{d.normalize():f}")
SUFFIXES = st.sampled_from(["", "n", "u", "m", "k", "M", "Ki", "Mi", "Gi", "e3", "E-2"])


@examples(100, guarded=True)
@given(number=NUMBERS, suffix=SUFFIXES)
def test_the_canonical_form_has_the_same_value_and_is_its_own_canonical_form(
    number: str, suffix: str
) -> None:
    text = canonical_quantity(number + suffix)
    assert parse_quantity(text) == parse_quantity(number + suffix)
    assert canonical_quantity(text) == text


COLLECTOR = {"podLabels": {"app": "collector"}}


def test_tracing_is_off_and_has_few_defaults() -> None:
    assert profile().tracing is None
    found = profile(tracing={"endpoint": "http://c.obs:4317", "collector": COLLECTOR}).tracing
    assert found is not None
    assert (found.protocol, found.sample_ratio, found.collector_port) == ("grpc", 0.01, 4317)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint": "http://c.obs"}, "endpoint"),
        ({"endpoint": "http://key@c.obs:4317"}, "endpoint"),
        ({"endpoint": "http://c.obs:4317/v1/traces"}, "has no path"),
        ({"sampleRatio": 2}, "sampleRatio"),
        ({"collector": {}}, "set either namespaceLabels and podLabels, or cidr"),
        ({"collector": {**COLLECTOR, "cidr": "10.0.0.0/8"}}, "or cidr"),
        ({"headers": "a=b"}, "headers"),
    ],
)
def test_tracing_that_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    tracing = {"endpoint": "http://c.obs:4317", "collector": COLLECTOR, **change}
    with pytest.raises(ValidationError, match=message):
        profile(tracing=tracing)


def test_tracing_and_its_option_of_vllm_exclude_one_another() -> None:
    tracing = {"endpoint": "http://c.obs:4317", "collector": COLLECTOR}
    with pytest.raises(ValidationError, match="remove it from extraArguments"):
        profile(tracing=tracing, extraArguments=["--otlp_traces_endpoint=http://c.obs:4317"])


def test_hosts_of_media_are_names_and_are_set_once() -> None:
    hosts = ["images.example.com", "registry"]
    assert profile(mediaDomains=hosts).media_domains == tuple(hosts)
    for wrong in ("*", "https://a.example.com", "a.example.com/x", "A.example.com", "", "-a"):
        with pytest.raises(ValidationError, match="mediaDomains"):
            profile(mediaDomains=[wrong])
    with pytest.raises(ValidationError, match="remove it from extraArguments"):
        profile(mediaDomains=hosts, extraArguments=["--allowed_media_domains=a.example.com"])


@pytest.mark.parametrize(
    "name", ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]
)
def test_services_never_say_where_spans_go(name: str) -> None:
    """Not even with a profile that lists the name, nor by an option."""
    assert not profile(env=["OTEL_*", name]).allows_env(name)
    asked = spec(engine={"options": {"otlp-traces-endpoint": "http://mine:4317"}})
    assert profile_errors(asked, profile())
