"""What only a GPU runs: vLLM's asynchronous scheduler with ours mixed in, and the protocol of model runner V2.

vLLM for CPU falls back to its other scheduler and to model runner V1. Here vLLM's own EngineCore,
scheduler, grammars and output processor work in one process, around a model that makes tokens up.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.engine_environment import PYTHON, ROOT

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cases(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case came to. They share one process, because importing vLLM takes most of the time."""
    folder = tmp_path_factory.mktemp("cores")
    answers = folder / "cases.json"  # threads of vLLM log to standard output to the very end
    places = (str(tiny_model), str(folder), str(answers))
    command = [str(PYTHON), "-m", "tests.support.vllm_core.run", *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, dict[str, Any]] = json.loads(answers.read_text())
    return found


def facts_of(cases: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    found = cases[name]
    assert "failed" not in found, found["failed"]
    return found


def test_ours_is_mixed_into_the_asynchronous_scheduler(cases: dict[str, dict[str, Any]]) -> None:
    """With a plain one vLLM would schedule a step while the tokens of the last one are unknown."""
    found = facts_of(cases, "chosen")
    assert found == {"asynchronous": True, "ours": True, "supported": True, "queue": 2, "v2": True}


@pytest.fixture(params=["load_v1", "load_v2"])
def load(request: pytest.FixtureRequest, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """240 requests of all tiers while limits change, clients hang up and the KV cache is short."""
    return facts_of(cases, request.param)


def test_every_client_gets_its_tokens_while_limits_change_under_way(load: dict[str, Any]) -> None:
    """In their order and none twice, whatever was preempted, aborted or deferred for a grammar."""
    assert load["wrong"] == []
    assert load["live"], "ours works to the end"
    assert min(load["aborted"], load["structured"], load["deferred"]) > 10
    assert load["preemptions"][0] > 5


def test_limits_and_tiers_hold_in_every_step(load: dict[str, Any]) -> None:
    """Nothing new starts above the limit, and nothing starts before what goes first."""
    assert load["violations"] == []


def test_counts_are_those_of_what_was_sent(load: dict[str, Any]) -> None:
    """Not of the step that was under way when its request ended."""
    assert load["generated"] == load["emitted"]
    assert load["preemptions"][0] == load["preemptions"][1]
    assert load["waits"][0] == load["waits"][1]
    assert load["steps"][0] == load["steps"][1]
    assert not any(load["left"])


def test_usage_is_what_vllm_counts(load: dict[str, Any]) -> None:
    """Of every request, aborted ones too."""
    assert load["usage"] == load["vllm"]
    assert min(load["usage"]) > 1_000


def test_a_request_that_holds_cache_while_it_waits_is_counted(
    cases: dict[str, dict[str, Any]],
) -> None:
    """vLLM keeps it in a queue of its own. It waits for something else than a step."""
    found = facts_of(cases, "session")
    assert found == {"waiting": [0, 1, 0], "blocked": 1, "running": [0, 0, 0]}


def test_a_request_that_waits_for_its_grammar_gives_its_slot_to_no_other_tier(
    cases: dict[str, dict[str, Any]],
) -> None:
    found = facts_of(cases, "grammar")
    assert found["found"] == found["kept"]
    assert found["ready"], "a realtime request that can run gets the slot"
