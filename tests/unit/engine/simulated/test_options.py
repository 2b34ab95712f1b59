"""vLLM's command line, as a simulated engine takes it."""

from __future__ import annotations

import logging

import pytest

from fleetkeeper_engine.simulated.options import known_options, parse_options
from fleetkeeper_engine.supervisor.termination import classify_death


def test_the_supervisors_arguments_have_their_effect() -> None:
    options = parse_options(
        [
            "--model=/model",
            "--served-model-name=tiny",
            "--max-model-len=16k",
            "--max-num-seqs=32",
            "--max-num-batched-tokens=2048",
            "--long-prefill-token-threshold=1792",
            "--scheduling-policy=priority",
            "--scheduler-cls=a.b",
            "--middleware=c.D",
            "--no-enable-prefix-caching",
            "--lora-modules",
            "one=/adapters/one",
            "two=/adapters/two",
            "--stream-interval=8",
        ]
    )
    assert options.served_model_names == ("tiny",)
    assert (options.max_model_len, options.max_num_seqs) == (16_000, 32)
    assert (options.max_num_batched_tokens, options.long_prefill_token_threshold) == (2048, 1792)
    assert (options.scheduler_cls, options.middleware) == ("a.b", ("c.D",))
    assert not options.enable_prefix_caching
    assert options.by_priority
    assert options.adapters == {"one": "/adapters/one", "two": "/adapters/two"}
    assert options.stream_interval == 8


def test_an_option_without_an_effect_is_taken_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        parse_options(["--enforce-eager", "--gpu-memory-utilization=0.8", "--dtype=bfloat16"])
    assert "gpu_memory_utilization" in caplog.text
    assert "enforce_eager" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option=1"],
        ["--max-num-seqs=many"],
        ["--max-num-seqs=0"],
        ["--dtype=float8"],
        ["--max-model-len"],
        ["--enforce-eager=yes"],
        ["--max-num-seqs=64", "--max-num-batched-tokens=32"],
        ["--max-model-len=512", "--long-prefill-token-threshold=1024"],
    ],
)
def test_a_wrong_option_ends_the_process_as_vllm(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        parse_options(arguments)
    assert ending.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    death = classify_death(lines, status=2, phase="start")
    assert death.death == "BadEngineOption"


def test_every_option_is_known_once() -> None:
    names = [name for name, _, _ in known_options()]
    assert len(names) == len(set(names)) > 300
