"""The allow-list against vLLM's own parser: every option exists, takes its values, and means one thing.

This can only change with the pinned versions of vLLM. `make test-engine-previous` asks the older one.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from fleetkeeper.api.options import ALLOWED, NEWEST_ONLY, VLLM_VERSIONS, Toggle, argument
from fleetkeeper.api.profiles.extra_arguments import extra_argument_errors
from fleetkeeper.api.types import Quantization
from fleetkeeper_contract.vllm_options import RESERVED, Setter, refused
from tests.support.engine.engine_environment import PYTHON
from tests.support.engine.supervised_engine import START_TIMEOUT_S

pytestmark = pytest.mark.exhaustive

PROGRAM = """
import json, sys
import vllm
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
flags = {flag: action.dest for action in parser._actions for flag in action.option_strings}
answers = []
for name, word in json.load(sys.stdin):
    try:
        parsed = vars(parser.parse_args(["--model", "x", word]))
        answers.append([name, word, repr(parsed.get(flags.get("--" + name)))])
    except SystemExit:
        answers.append([name, word, None])
print("\\n" + json.dumps({
    "version": vllm.__version__, "flags": flags, "answers": answers,
    "quantizations": list(QUANTIZATION_METHODS),
}))
"""


SPELLINGS = {
    "--num-gpu-blocks-over=5": ("num-gpu-blocks-override", "5"),
    "--num_gpu_blocks_override=5": ("num-gpu-blocks-override", "5"),
    "--num_gpu-b=5": ("num-gpu-blocks-override", "5"),
    "--device_memory_util=0.95": ("gpu-memory-utilization", "0.95"),
    "--no-enable_prefix": ("enable-prefix-caching", "False"),
    "--speculative_config.method=ngram": ("speculative-config", "{'method': 'ngram'}"),
    "--speculative-conf.a.b+=1": ("speculative-config", "{'a': {'b': ['1']}}"),
    "-tp=2": ("tensor-parallel-size", "2"),
}
"""Spellings of reserved options, with what vLLM's parser takes them for."""


@pytest.fixture(scope="module")
def vllm() -> dict[str, Any]:
    """What vLLM's parser makes of every option of the list with every example of its values."""
    words = [
        (name, argument(name, value))
        for name, option in ALLOWED.items()
        for value in option.takes.examples()
    ]
    spellings = [(name, spelled) for spelled, (name, _) in SPELLINGS.items()]
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM],
        input=json.dumps(words + spellings),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    answer["spelled"] = answer["answers"][len(words) :]
    answer["answers"] = answer["answers"][: len(words)]
    return answer


def test_the_list_was_made_for_this_version(vllm: dict[str, Any]) -> None:
    assert any(vllm["version"].startswith(version) for version in VLLM_VERSIONS)


def is_newest(vllm: dict[str, Any]) -> bool:
    """True if this is the newest version that the list was made for."""
    return str(vllm["version"]).startswith(VLLM_VERSIONS[-1])


def newer_words(vllm: dict[str, Any]) -> set[str]:
    """The arguments that this version cannot know."""
    known = {} if is_newest(vllm) else NEWEST_ONLY
    return {argument(name, value) for name, values in known.items() for value in values}


def test_every_option_is_one_of_vllms_own_by_its_whole_name(vllm: dict[str, Any]) -> None:
    assert [name for name in ALLOWED if f"--{name}" not in vllm["flags"]] == []


def test_every_value_of_the_list_is_taken_by_vllms_parser(vllm: dict[str, Any]) -> None:
    refused = [word for _, word, value in vllm["answers"] if value is None]
    assert sorted(refused) == sorted(newer_words(vllm))


def test_toggles_switch_on_and_off(vllm: dict[str, Any]) -> None:
    for name, word, value in vllm["answers"]:
        if isinstance(ALLOWED[name].takes, Toggle):
            assert value == ("False" if word.startswith("--no-") else "True"), word


def test_a_value_arrives_as_it_was_written(vllm: dict[str, Any]) -> None:
    for name, word, value in vllm["answers"]:
        if not isinstance(ALLOWED[name].takes, Toggle) and word not in newer_words(vllm):
            written = word.partition("=")[2]
            assert written in value or float(written) == float(value.strip("'")), (word, value)


def test_every_reserved_option_exists(vllm: dict[str, Any]) -> None:
    """Names that no longer exist there would be a guard against nothing."""
    newer = set() if is_newest(vllm) else {"grpc-port"}
    missing = {
        name
        for name in RESERVED
        if not any(
            flag == f"--{name}" or (name.endswith("-") and flag.startswith(f"--{name}"))
            for flag in vllm["flags"]
        )
    }
    assert missing == newer


def test_every_other_name_of_a_reserved_option_is_reserved(vllm: dict[str, Any]) -> None:
    """vLLM has options with two names, such as device-memory-utilization."""
    names: dict[str, set[str]] = {}
    for flag, target in vllm["flags"].items():
        if flag.startswith("--"):
            names.setdefault(target, set()).add(flag.removeprefix("--"))
    assert any(len({name.removeprefix("no-") for name in same}) > 1 for same in names.values())
    for setter in (Setter.SERVICE, Setter.PROFILE):
        for same in names.values():
            assert len({refused(name, setter) is None for name in same}) == 1, (setter, same)


def test_every_quantization_of_the_schema_is_known(vllm: dict[str, Any]) -> None:
    assert [word for word in Quantization if word not in vllm["quantizations"]] == []


def test_a_profile_can_set_every_option_that_is_not_reserved(vllm: dict[str, Any]) -> None:
    """No whole name is refused as an abbreviation of another one."""
    reserved = {name for name, row in RESERVED.items() if Setter.PROFILE not in row.setters}
    families = tuple(name for name in reserved if name.endswith("-"))
    found = {
        flag.removeprefix("--").removeprefix("no-")
        for flag in vllm["flags"]
        if flag.startswith("--") and extra_argument_errors([f"{flag}=1"])
    }
    assert [name for name in found if name not in reserved and not name.startswith(families)] == []


def test_a_spelling_that_vllm_understands_is_refused_to_profiles(vllm: dict[str, Any]) -> None:
    for spelled, (name, value) in SPELLINGS.items():
        assert [name, spelled, value] in vllm["spelled"]
        assert extra_argument_errors([spelled]), spelled


def test_the_engine_refuses_services_every_abbreviation(vllm: dict[str, Any]) -> None:
    """Every beginning that vLLM's parser would take for an option that services must not set."""
    names = {flag.removeprefix("--") for flag in vllm["flags"] if flag.startswith("--")}
    taken = {name for name in names if refused(name, Setter.SERVICE)}
    assert len(taken) > len(RESERVED)
    for name in taken:
        for length in range(1, len(name)):
            short = name[:length]
            assert short in names or refused(short, Setter.SERVICE), short


def test_a_profile_cannot_abbreviate_a_reserved_option(vllm: dict[str, Any]) -> None:
    """Every beginning that vLLM's parser would take for the option."""
    flags = [flag for flag in vllm["flags"] if flag.startswith("--")]
    for flag in flags:
        if not extra_argument_errors([f"{flag}=1"]):
            continue
        for length in range(3, len(flag)):
            short = flag[:length]
            if short not in flags and not short.endswith("-"):
                assert extra_argument_errors([f"{short}=1"]), short
