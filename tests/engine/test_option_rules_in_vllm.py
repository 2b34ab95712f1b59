"""The rules between engine options on vLLM itself: what they refuse ends it, what they allow does not.

This can only change with the pinned versions of vLLM. `make test-engine-previous` asks the older one.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fleetkeeper.api.option_values import PARTNERS
from fleetkeeper.api.schema.option_rules import COMBINATIONS
from tests.support.engine.engine_environment import PYTHON, make_tiny_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

PROGRAM = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

model, runs = sys.argv[1], json.load(sys.stdin)
parser, answers = make_arg_parser(FlexibleArgumentParser()), []
for words in runs:
    try:
        arguments = parser.parse_args(["--model", model, *words])
        validate_parsed_serve_args(arguments)
        arguments.model = model
        # EngineCore calls the second one before it loads the model.
        EngineArgs.from_cli_args(arguments).create_engine_config().validate_block_size()
        answers.append("")
    except Exception as problem:
        answers.append(str(problem))
print("\\n" + json.dumps(answers))
"""

# For each rule: what it refuses, the nearest that it allows, and a word of vLLM's reason.
RULES: dict[str, tuple[str, str, str]] = {
    "without enable-chunked-prefill": (
        "--no-enable-chunked-prefill --max-model-len=513 --max-num-batched-tokens=512",
        "--no-enable-chunked-prefill --max-model-len=512 --max-num-batched-tokens=512",
        "smaller than max_model_len",
    ),
    "max-cpu-loras": (
        "--enable-lora --max-loras=3 --max-cpu-loras=2",
        "--enable-lora --max-loras=2 --max-cpu-loras=2",
        "max_cpu_loras",
    ),
    "decode-context-parallel-size": (
        "--decode-context-parallel-size=2",
        "--decode-context-parallel-size=1",
        "divisible",
    ),
    "mamba-block-size": (
        "--mamba-block-size=16 --no-enable-prefix-caching",
        "--mamba-block-size=512 --no-enable-prefix-caching --max-model-len=512",
        "--enable-prefix-caching",
    ),
    "mamba-cache-mode align": (
        "--mamba-cache-mode=align --disable-chunked-mm-input",
        "--mamba-cache-mode=align",
        "Chunked MM input",
    ),
    "async-scheduling": (
        "--async-scheduling --spec-method=ngram --spec-tokens=2",
        "--no-async-scheduling --spec-method=ngram --spec-tokens=2",
        "async scheduling",
    ),
    "with model.adapters": (
        "--enable-lora --spec-method=ngram --spec-tokens=3 --max-num-seqs=129 --max-num-batched-tokens=512",
        "--enable-lora --spec-method=ngram --spec-tokens=3 --max-num-seqs=128 --max-num-batched-tokens=512",
        "num_speculative_tokens",
    ),
    "enable-auto-tool-choice": (
        "--enable-auto-tool-choice",
        "--enable-auto-tool-choice --tool-call-parser=hermes",
        "--tool-call-parser",
    ),
    "spec-method": (
        "--spec-method=ngram",
        "--spec-method=ngram --spec-tokens=2",
        "num_speculative_tokens",
    ),
    "spec-tokens": (
        "--spec-tokens=2",
        "--spec-method=ngram --spec-tokens=2",
        "num_speculative_tokens",
    ),
}


def test_every_rule_is_tried() -> None:
    names = {rule.message.partition(" requires")[0] for rule in COMBINATIONS}
    untried = {name for name in names if not name.startswith(tuple(RULES))}
    assert untried == set()
    assert {option for option, _ in PARTNERS} <= RULES.keys()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """vLLM's reason to end with what each rule refuses, and with what it allows; "" if it starts."""
    model: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    runs = [words.split() for refused, allowed, _ in RULES.values() for words in (refused, allowed)]
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, model],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = iter(json.loads(done.stdout.strip().splitlines()[-1]))
    return {name: (next(found), next(found)) for name in RULES}


@pytest.mark.parametrize("name", RULES)
def test_vllm_refuses_what_the_rule_refuses_and_nothing_less(
    answers: dict[str, tuple[str, str]], name: str
) -> None:
    refused, allowed = answers[name]
    assert RULES[name][2] in refused
    assert allowed == ""
