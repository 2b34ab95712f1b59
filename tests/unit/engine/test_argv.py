"""vLLM's arguments and environment, from the document and the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleetkeeper_engine.in_vllm.vllm_settings import ENVIRONMENT as SETTINGS
from fleetkeeper_engine.in_vllm.vllm_settings import (
    MIDDLEWARE,
    SCHEDULER_FACTORY,
    TRACED_MIDDLEWARE,
)
from fleetkeeper_engine.spec import DType
from fleetkeeper_engine.supervisor.launch.argv import (
    KEEP_ALIVE,
    Launch,
    desired_argv,
    desired_environment,
)
from fleetkeeper_engine.supervisor.launch.memory_plan import MemoryPlan
from tests.support.engine.engine_documents import a_document

GIB = 1024**3


LAUNCH = Launch(
    python="/usr/bin/python3",
    entry="vllm.entrypoints.openai.api_server",
    model="/models/m",
    adapters={},
    dtype=DType.FLOAT32,
    lora_rank=8,
    max_length=32_768,
    region="/dev/shm/fleetkeeper/shared-memory",
    package_path="/opt/own",
    internal_token="secret-mark",
    threads=4,
)


PLAN = MemoryPlan(cap_bytes=GIB, kv_cache_bytes=GIB)


def test_every_option_is_one_token_and_the_plan_is_in_it() -> None:
    words = desired_argv(a_document(engine={"tensorParallelSize": 2}), PLAN, LAUNCH)
    assert words[:3] == ["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert all(word.startswith("--") for word in words[3:])
    for expected in (
        "--model=/models/m",
        "--scheduling-policy=priority",
        f"--scheduler-cls={SCHEDULER_FACTORY}",
        f"--middleware={MIDDLEWARE}",
        "--api-server-count=1",
        "--shutdown-timeout=0",
        f"--kv-cache-memory-bytes={GIB // 2}",
        "--enable-prefix-caching",
        "--long-prefill-token-threshold=7936",
    ):
        assert expected in words
    assert not any(word.startswith("--gpu-memory-utilization") for word in words)
    names = [word.partition("=")[0] for word in words[3:]]
    assert len(set(names)) == len(names)


def test_one_prompts_part_of_a_step_is_never_above_the_longest_sequence() -> None:
    """vLLM would refuse to start: a model of 512 tokens with batches of 8192 is a plain wish."""
    short = replace(LAUNCH, max_length=512)
    assert "--long-prefill-token-threshold=512" in desired_argv(a_document(), PLAN, short)


def test_truths_become_flags_and_adapters_come_as_words_of_one_option() -> None:
    document = a_document(
        engine={
            "options": {"enforce-eager": "true", "async-scheduling": "false", "seed": "7"},
            "prefixCaching": False,
        }
    )
    adapters = {"sql": "/adapters/sql", "law": "/adapters/law"}
    launch = Launch(**{**_fields(LAUNCH), "adapters": adapters, "lora_rank": 16, "eager": True})
    words = desired_argv(document, PLAN, launch)
    assert "--no-enable-prefix-caching" in words
    assert words[-3:] == ["--no-async-scheduling", "--enforce-eager", "--seed=7"]
    assert words.count("--enforce-eager") == 1
    place = words.index("--lora-modules")
    assert words[place + 1 : place + 3] == ["sql=/adapters/sql", "law=/adapters/law"]
    assert {"--enable-lora", "--max-loras=2", "--max-lora-rank=16"} <= set(words)


@pytest.mark.promise("media-domains")
def test_no_media_are_fetched_unless_the_profile_names_their_hosts() -> None:
    """vLLM takes an empty list as all hosts, and follows redirections past the list."""
    option = "--allowed-media-domains"
    words = desired_argv(a_document(), PLAN, LAUNCH)
    assert [word for word in words if "media" in word] == [f"{option}=none.invalid"]
    document = a_document(engine={"mediaDomains": ["images.example.com", "cdn.example.com"]})
    words = desired_argv(document, PLAN, LAUNCH)
    place = words.index(option)
    assert words[place + 1 : place + 3] == ["images.example.com", "cdn.example.com"]
    assert all(word.startswith("--") for word in words[place + 3 :])
    redirects = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
    assert desired_environment(document, PLAN, LAUNCH, {})[redirects] == "0"
    assert desired_environment(document, PLAN, LAUNCH, {redirects: "1"})[redirects] == "1"


def test_idle_connections_stay_longer_than_proxies_keep_them() -> None:
    """A profile may say otherwise."""
    document = a_document()
    assert desired_environment(document, PLAN, LAUNCH, {})[KEEP_ALIVE] == "75"
    assert desired_environment(document, PLAN, LAUNCH, {KEEP_ALIVE: "9"})[KEEP_ALIVE] == "9"


def test_hosts_of_media_in_the_arguments_of_a_profile_stay_as_they_are() -> None:
    """Profiles from before the field have them there."""
    given = "--allowed_media_domains=images.example.com"
    profile = {"name": "cpu-0.32.0-2", "extraArguments": [given]}
    words = desired_argv(a_document(engine={"profile": profile}), PLAN, LAUNCH)
    assert [word for word in words if "media" in word] == [given]


def test_a_cuda_plan_is_a_share_of_the_device() -> None:
    plan = MemoryPlan(cap_bytes=GIB, gpu_memory_utilization=0.78)
    words = desired_argv(a_document(accelerator="cuda"), plan, LAUNCH)
    assert "--gpu-memory-utilization=0.7800" in words
    assert not any("kv-cache-memory-bytes" in word for word in words)


def test_without_a_compiler_nothing_is_compiled_on_first_use_either() -> None:
    launch = Launch(**{**_fields(LAUNCH), "eager": True})
    assert desired_environment(a_document(), PLAN, launch, {})["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in desired_environment(a_document(), PLAN, LAUNCH, {})


def test_a_streamed_model_has_its_address_its_loader_and_its_buffers() -> None:
    streamed = replace(LAUNCH, model="s3://models/llama", load_format="runai_streamer")
    plan = replace(PLAN, stream_buffer_bytes=GIB)
    assert {"--model=s3://models/llama", "--load-format=runai_streamer"} <= set(
        desired_argv(a_document(), plan, streamed)
    )
    given = {"RUNAI_STREAMER_MEMORY_LIMIT": "40000000000"}
    child = desired_environment(a_document(), plan, streamed, given)
    assert child["RUNAI_STREAMER_MEMORY_LIMIT"] == str(GIB), "the plan's, whatever the profile sets"
    assert not any("load-format" in word for word in desired_argv(a_document(), PLAN, LAUNCH))


def test_what_would_undo_the_plan_is_not_handed_on() -> None:
    given = {
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "FLEETKEEPER_ENGINE": "{}",
        "PYTHONPATH": "/else",
        "VLLM_API_KEY": "key",
        "OMP_NUM_THREADS": "2",
    }
    child = desired_environment(a_document(), PLAN, LAUNCH, given)
    assert "VLLM_CPU_KVCACHE_SPACE" not in child
    assert "FLEETKEEPER_ENGINE" not in child
    assert child["VLLM_API_KEY"] == "key"
    assert child["PYTHONPATH"] == "/opt/own:/else"
    assert child["OMP_NUM_THREADS"] == "2", "the pod's own setting wins"
    assert desired_environment(a_document(), PLAN, LAUNCH, {})["OMP_NUM_THREADS"] == "4"
    assert child["FLEETKEEPER_SHARED_MEMORY"] == "/dev/shm/fleetkeeper/shared-memory"
    assert child["HF_HUB_OFFLINE"] == "1"
    assert json.loads(child[SETTINGS])["internal_token"] == "secret-mark"


def test_without_tracing_nothing_of_it_is_set() -> None:
    words = desired_argv(a_document(), PLAN, LAUNCH)
    assert f"--middleware={MIDDLEWARE}" in words
    assert not [word for word in words if "otlp" in word]
    assert not [
        name for name in desired_environment(a_document(), PLAN, LAUNCH, {}) if "OTEL" in name
    ]


@pytest.mark.parametrize(
    ("protocol", "endpoint", "sent_to", "named"),
    [
        ("grpc", "http://collector.obs:4317", "http://collector.obs:4317", "grpc"),
        ("http", "http://c:4318", "http://c:4318/v1/traces", "http/protobuf"),
        ("http", "https://c:443/otlp/x", "https://c:443/otlp/x", "http/protobuf"),
    ],
)
def test_tracing_configures_vllm_and_the_middleware_alike(
    protocol: str, endpoint: str, sent_to: str, named: str
) -> None:
    """The document wins over what the pod's environment says."""
    document = a_document(tracing={"endpoint": endpoint, "protocol": protocol})
    words = desired_argv(document, PLAN, LAUNCH)
    assert f"--middleware={TRACED_MIDDLEWARE}" in words
    assert f"--otlp-traces-endpoint={sent_to}" in words
    given = {
        "POD_UID": "u1",
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=b",
    }
    child = desired_environment(document, PLAN, LAUNCH, given)
    assert {name: value for name, value in child.items() if name.startswith("OTEL_")} == {
        "OTEL_EXPORTER_OTLP_HEADERS": "a=b",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": sent_to,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": named,
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "3",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.01",
        "OTEL_SERVICE_NAME": "chat",
        "OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=u1,k8s.pod.uid=u1",
    }


def _fields(launch: Launch) -> dict[str, Any]:
    return {name: getattr(launch, name) for name in Launch.__dataclass_fields__}
