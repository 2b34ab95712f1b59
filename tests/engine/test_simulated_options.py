"""A simulated engine knows vLLM's options, with the kinds of their values."""

from __future__ import annotations

import json
import subprocess

import pytest

from fleetkeeper_engine.simulated.options import known_options
from tests.support.engine.engine_environment import PYTHON

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

PROGRAM = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

found = {}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    takes = "none" if action.nargs == 0 else "several" if action.nargs == "+" else "one"
    for name in action.option_strings:
        if name.startswith("--") and not name.startswith("--no-") and name != "--help":
            found[name[2:]] = takes
print("\\n" + json.dumps(found))
"""


def test_the_options_are_those_of_vllms_parser() -> None:
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=500
    )
    of_vllm = json.loads(done.stdout.splitlines()[-1])
    takes = {"toggle": "none", "flag": "none"}
    ours = {
        name: "several" if many == "+" else takes.get(kind, "one")
        for name, kind, many in known_options()
    }
    assert ours == of_vllm
