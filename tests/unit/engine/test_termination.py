"""The class of a death, from output that vLLM, torch and huggingface_hub really wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.exit_codes import EXIT_CODES, DeathClass
from fleetkeeper_engine.spec import Profile
from fleetkeeper_engine.supervisor.health import NO_ANSWER
from fleetkeeper_engine.supervisor.termination import (
    DETAIL_BYTES,
    MESSAGE_BYTES,
    Death,
    classify_death,
    with_profile,
)

CASES = [
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
        DeathClass.CUDA_OUT_OF_MEMORY,
    ),
    (
        "(EngineCore pid=9) ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        DeathClass.CUDA_OUT_OF_MEMORY,
    ),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes.",
        DeathClass.HOST_OUT_OF_MEMORY,
    ),
    (
        "(EngineCore pid=1) ValueError: Available memory on node 0 (3.1/4.0 GiB) on kv cache allocation is less than requested memory for kv (9.0 GiB).",
        DeathClass.HOST_OUT_OF_MEMORY,
    ),
    (
        "(APIServer pid=1) Value error, Model architectures ['NoSuchForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A'])",
        DeathClass.UNSUPPORTED_ARCHITECTURE,
    ),
    (
        "PermissionError: [Errno 13] Permission denied: '/models/m/config.json'",
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        "s3://models/llama: NoSuchBucket: An error occurred (NoSuchBucket) when calling the ListObjectsV2 operation: The specified bucket does not exist",
        DeathClass.MODEL_NOT_FOUND,
    ),
    (
        "s3://models/llama: NoSuchKey: there is no config.json; set model.source to the prefix that contains it",
        DeathClass.MODEL_NOT_FOUND,
    ),
    (
        "s3://models/llama: ClientError: An error occurred (AccessDenied) when calling the ListObjectsV2 operation: Access Denied",
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        "s3://models/llama: ClientError: An error occurred (InvalidAccessKeyId) when calling the ListObjectsV2 operation: The AWS Access Key Id you provided does not exist in our records.",
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        "s3://models/llama: NoCredentialsError: Unable to locate credentials",
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        's3://models/llama: EndpointConnectionError: Could not connect to the endpoint URL: "http://minio.storage.svc:9000/models"',
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.",
        DeathClass.MODEL_NOT_FOUND,
    ),
    (
        "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error.",
        DeathClass.MODEL_NOT_FOUND,
    ),
    (
        "huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url",
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        "huggingface_hub.errors.HfHubHTTPError: Client error '401 Unauthorized' for url 'https://hub/a'",
        DeathClass.MODEL_NOT_READABLE,
    ),
    (
        "huggingface_hub.errors.HfHubHTTPError: Client error '404 Not Found' for url 'https://hub/a'",
        DeathClass.MODEL_NOT_FOUND,
    ),
    (
        "OSError: /models/x does not appear to have a file named tokenizer.json",
        DeathClass.MODEL_NOT_FOUND,
    ),
    (
        "api_server.py: error: unrecognized arguments: --no-such-option=1",
        DeathClass.BAD_ENGINE_OPTION,
    ),
    (
        "api_server.py: error: argument --block-size: invalid choice: 7",
        DeathClass.BAD_ENGINE_OPTION,
    ),
    ("RuntimeError: Worker proc VllmWorker-0 died with exit code -4", DeathClass.BAD_ENGINE_OPTION),
    (
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor.",
        DeathClass.BAD_ENGINE_OPTION,
    ),
    (
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
        DeathClass.UNKNOWN,
    ),
    ("something else", DeathClass.UNKNOWN),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_the_output_tells_the_class(line: str, expected: DeathClass) -> None:
    death = classify_death(["INFO before", line, "after"], status=1, phase="start")
    assert death.death is expected
    assert death.code == EXIT_CODES[expected]
    assert "\n" not in death.message


def test_what_pydantic_counts_first_is_told_by_the_line_below() -> None:
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig",
        "  Value error, max_num_seqs (0) must be at least 1 (now 0). [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]",
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    ]
    death = classify_death(lines, status=1, phase="start")
    assert death.death is DeathClass.BAD_ENGINE_OPTION
    assert death.message.endswith(": max_num_seqs (0) must be at least 1 (now 0).")
    alone = classify_death(lines[:1], status=1, phase="start")
    assert alone.message.endswith("1 validation error for SchedulerConfig")


def test_an_unknown_end_names_the_exception_that_began_it() -> None:
    # As vLLM 0.32.0 for CUDA wrote it without FlashInfer.
    lines = [
        "(EngineCore pid=866) ERROR 11-27 12:26:25 [core.py:1510] Traceback (most recent call last):",
        "(EngineCore pid=866) ERROR 11-27 12:26:25 [core.py:1510]     from flashinfer import (",
        "(EngineCore pid=866) ERROR 11-27 12:26:25 [core.py:1510] ModuleNotFoundError: No module named 'flashinfer'",
        "Process EngineCore:",
        "ModuleNotFoundError: No module named 'flashinfer'",
        "    raise RuntimeError(",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    death = classify_death(lines, status=1, phase="start")
    assert death.death is DeathClass.UNKNOWN
    assert (
        death.message
        == "vLLM ended with status 1: ModuleNotFoundError: No module named 'flashinfer'"
    )
    # What the API server says, after EngineCore had an exception or was killed without one.
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
    alone = classify_death(
        ["RuntimeError: Executor failed.", lines[-1], dead], status=1, phase="start"
    )
    assert alone.message == "vLLM ended with status 1"


def test_the_kernels_verdict_and_our_own_count_more_than_the_output() -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory."
    killed = classify_death([line], status=-9, phase="serve", oom_kills=1)
    assert killed.death is DeathClass.HOST_OUT_OF_MEMORY
    hung = classify_death([line], status=-9, phase="serve", hang=NO_ANSWER)
    assert (hung.death, hung.message) == (DeathClass.HUNG, NO_ANSWER)


def test_an_end_by_a_signal_names_it() -> None:
    assert "SIGKILL" in classify_death([], status=-9, phase="serve").message
    assert classify_death([], status=-4, phase="serve").death is DeathClass.BAD_ENGINE_OPTION


@given(st.lists(st.text(max_size=400) | st.just("\x00" * 400), max_size=60))
def test_the_termination_line_is_one_line_of_json_that_kubernetes_keeps_whole(
    lines: list[str],
) -> None:
    """Kubernetes keeps 4096 bytes of a termination message."""
    line = classify_death(lines, status=1, phase="serve").termination_line()
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["code"] == EXIT_CODES[DeathClass(parsed["class"])]
    assert len(parsed["detail"].encode()) <= DETAIL_BYTES
    assert len(line.encode()) <= 4096


def _refused(line: str, *arguments: str, phase: str = "start") -> Death:
    profile = Profile(name="cuda-0.32.0-2", extra_arguments=arguments or ("--no-dbo_x=1",))
    return with_profile(classify_death([line], status=2, phase=phase), profile)


@pytest.mark.parametrize(
    ("line", "argument"),
    [
        ("api_server.py: error: unrecognized arguments: --dbo-x=1", "--dbo_x=1"),
        ('api_server.py: error: unrecognized arguments: --dbo-x {"a": 1}', "--dbo_x.a=1"),
        ("api_server.py: error: argument --dbo-x/--no-dbo-x: ignored explicit argument", "--dbo-x"),
        ("api_server.py: error: argument --dbo-x/--no-dbo-x: ignored explicit argument", "--no-dbo-x=1"),
    ],
)  # fmt: skip
def test_an_argument_of_the_profile_that_vllm_rejects_is_named_with_the_profile(
    line: str, argument: str
) -> None:
    death = _refused(line, "--seed=1", argument)
    assert death.death is DeathClass.BAD_ENGINE_OPTION
    assert death.message.endswith(
        f" (the engine profile cuda-0.32.0-2 sets {argument.partition('=')[0]})"
    )


def test_a_rejection_that_names_no_argument_of_the_profile_does_not_blame_one() -> None:
    death = _refused("api_server.py: error: unrecognized arguments: --dbo-xy=1", "--dbo-x=1")
    assert death.message.endswith(" (the engine profile cuda-0.32.0-2 sets extraArguments too)")
    other = "ValueError: No available memory for the cache blocks."
    assert "profile" not in _refused(other).message
    assert "profile" not in _refused("error: argument --dbo-x", phase="serve").message
    alone = classify_death(["error: argument --dbo-x: no"], status=2, phase="start")
    assert with_profile(alone, None) == alone


def test_a_rejection_of_many_long_arguments_keeps_its_beginning() -> None:
    arguments = [f"--{letter * 60}=1" for letter in "abcdefgh"]
    line = f"api_server.py: error: unrecognized arguments: {' '.join(arguments)}"
    message = json.loads(_refused(line, *arguments).termination_line())["message"]
    assert message.startswith("vLLM rejected an option: ")
    assert len(message.encode()) <= MESSAGE_BYTES
