"""What a simulated engine has of its own: faults, stages, step times, and what it costs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import psutil
import pytest
import requests

from fleetkeeper_contract.exit_codes import EXIT_CODES, DeathClass
from fleetkeeper_engine.simulated.simulation_settings import VERSION_TEXT
from fleetkeeper_engine.supervisor.supervisor import START_POLL_S
from fleetkeeper_steps.hardware import known_hardware
from tests.simulated.conftest import MIB, StartSimulated
from tests.support.engine.engine_contract import (
    CHAT,
    COMPLETIONS,
    chat,
    completion,
    entries,
    frames,
    post,
    quiet,
    with_usage,
)
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S

MAX_PSS_BYTES = 130 * MIB
STEPS = 200


def family(engine: RunningEngine) -> list[psutil.Process]:
    supervisor = psutil.Process(engine.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def test_it_says_that_it_is_simulated(engine: RunningEngine) -> None:
    """The version, each answer, metrics and the log."""
    found = requests.get(f"{engine.url}/version", timeout=GUARD_S).json()
    assert found == {"version": VERSION_TEXT}
    for path, body in ((COMPLETIONS, completion()), (CHAT, chat())):
        assert post(engine, path, body).json()["system_fingerprint"] == VERSION_TEXT
        last = frames(post(engine, path, with_usage(body)))[-1]
        assert last["system_fingerprint"] == VERSION_TEXT
    names = [name for name in engine.metrics() if name.startswith("fleetkeeper_engine_info")]
    assert [VERSION_TEXT in name for name in names] == [True]
    assert "simulated engine" in engine.log


def test_supervisor_and_engine_take_little_memory(engine: RunningEngine) -> None:
    quiet(engine)
    processes = family(engine)
    assert len(processes) == 2
    taken = [process.memory_full_info().pss for process in processes]
    seconds = [sum(process.cpu_times()[:2]) for process in processes]
    print(f"PSS {[amount // MIB for amount in taken]} MiB, processor {seconds} s")
    assert sum(taken) <= MAX_PSS_BYTES
    assert "torch" not in {Path(item.path).name for item in processes[1].memory_maps()}


def test_an_answer_ends_by_itself_at_the_same_place(engine: RunningEngine) -> None:
    bodies = [completion(2000, ignore_eos=False) for _ in range(2)]
    first, second = (post(engine, COMPLETIONS, body).json() for body in bodies)
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["usage"] == second["usage"]
    assert first["choices"] == second["choices"]


@pytest.mark.parametrize("name", ["h100-8b", "h100-70b"])
def test_steps_take_what_the_fit_says(start: StartSimulated, name: str) -> None:
    """The mean of many steps. A busy machine makes them longer, never shorter, so the least of three."""
    engine = start(simulation={"hardware": name})
    expected_s = known_hardware()[name].step_time_s(0, 1, 100)
    ratios = []
    for _ in range(3):
        before = engine.metrics()
        post(engine, COMPLETIONS, completion(STEPS))
        quiet(engine)
        after = engine.metrics()
        seconds, steps = (
            after[f"fleetkeeper_batch_time_seconds_{kind}"]
            - before[f"fleetkeeper_batch_time_seconds_{kind}"]
            for kind in ("sum", "count")
        )
        assert steps >= STEPS
        ratios.append(seconds / steps / expected_s)
    print(f"{name}: steps over the fit {[round(ratio, 3) for ratio in ratios]}")
    assert 0.95 <= min(ratios) <= 1.5


def test_speed_divides_the_time_of_steps(start: StartSimulated) -> None:
    costs = {"t0Seconds": 0.5, **{f"{name}Seconds": 0.0 for name in "wgbcq"}}
    took_s = []
    for speed in (5.0, 50.0):
        engine = start(simulation={"costs": costs, "speed": speed})
        began = time.monotonic()
        post(engine, COMPLETIONS, completion(20))
        took_s.append(time.monotonic() - began)
    assert took_s[0] >= 20 * 0.5 / 5
    assert took_s[1] < took_s[0]


def test_the_stages_of_a_start_take_their_time(start: StartSimulated) -> None:
    """The supervisor sees the API server's first answer up to a period of its probe later."""
    wanted = {"weights": 2.0, "load": 1.5, "warmUp": 2.5}
    engine = start(simulation={"startSeconds": wanted})
    found = engine.metrics()
    for stage, name in (("weights", "weights"), ("load", "load"), ("warm_up", "warmUp")):
        seconds = found[f'fleetkeeper_start_seconds{{stage="{stage}"}}']
        assert seconds >= wanted[name] - START_POLL_S


def test_a_drain_during_a_slow_start_ends_it(start: StartSimulated) -> None:
    engine = start(wait=False, simulation={"startSeconds": {"weights": 3600}})
    engine.wait_for(lambda: "starting vLLM" in engine.log, "the start", GUARD_S)
    engine.process.terminate()
    assert engine.wait_end() == 0


def test_an_engine_that_does_not_stop_at_the_end_of_its_drain_is_no_hang(
    start: StartSimulated,
) -> None:
    """It gets SIGTERM after 2 s and is killed 10 s later. stallSeconds end between the two."""
    engine = start(drain={"seconds": 2, "noticeSeconds": 0}, health={"stallSeconds": 10})
    _, vllm = family(engine)
    name = 'fleetkeeper_running{tier="standard"}'
    with post(engine, COMPLETIONS, completion(1900, stream=True), stream=True):
        engine.wait_for(lambda: engine.metrics()[name] == 1, "a request that runs", GUARD_S)
        engine.process.terminate()
        vllm.suspend()
        assert engine.wait_end() == 0
    assert not (engine.directory / "termination").exists(), "a drain is no death"


def test_exhausted_memory_ends_the_pod_with_its_class(start: StartSimulated) -> None:
    """The stream under way gets vLLM's error, and its tokens are counted."""
    engine = start(simulation={"faults": [{"kind": "OutOfMemory", "afterSeconds": 3}]})
    answer = post(engine, COMPLETIONS, with_usage(completion(2000)))
    *_, last, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "InternalServerError"
    assert engine.wait_end() == EXIT_CODES[DeathClass.CUDA_OUT_OF_MEMORY]
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("CUDAOutOfMemory", "serve")
    assert entries(engine)[-1].aborted
    assert entries(engine)[-1].tokens.answer > 0


def test_a_crash_ends_the_pod_with_its_signal(start: StartSimulated) -> None:
    engine = start(simulation={"faults": [{"kind": "Crash", "afterSeconds": 2}]})
    assert engine.wait_end(GUARD_S) == EXIT_CODES[DeathClass.UNKNOWN]
    assert "SIGSEGV" in engine.termination()["message"]


def test_a_frozen_engine_answers_and_is_found_hung(start: StartSimulated) -> None:
    engine = start(
        simulation={"faults": [{"kind": "Freeze", "afterSeconds": 2}]},
        health={"stallSeconds": 5},
    )
    engine.wait_for(lambda: "simulated fault Freeze" in engine.log, "the fault", GUARD_S)
    assert requests.get(f"{engine.url}/health", timeout=GUARD_S).status_code == 200
    with pytest.raises(requests.RequestException):
        post(engine, COMPLETIONS, completion(20))
    assert engine.wait_end(GUARD_S) == EXIT_CODES[DeathClass.HUNG]


def test_fragmentation_is_measured(start: StartSimulated) -> None:
    engine = start(simulation={"faults": [{"kind": "Fragmentation", "afterSeconds": 0}]})
    name = "fleetkeeper_memory_fragmentation_ratio"
    engine.wait_for(lambda: engine.metrics().get(name, 0) > 0.1, "fragmentation", GUARD_S)


def test_adapters_are_served_by_their_names(start: StartSimulated) -> None:
    adapters = [{"name": "poet", "path": "/no/adapter"}]
    engine = start(model={"adapters": adapters})
    cards = requests.get(f"{engine.url}/v1/models", timeout=GUARD_S).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("poet", "tiny")]
    answer = post(engine, COMPLETIONS, completion(3, model="poet")).json()
    assert answer["model"] == "poet"
    engine.wait_for(lambda: entries(engine)[-1].adapter == "poet", "the entry", GUARD_S)


def test_embeddings_are_served_by_a_pooling_engine(start: StartSimulated) -> None:
    engine = start(engine={"options": {"runner": "pooling", "convert": "embed"}})
    body = {"model": "tiny", "input": ["one two", "three"]}
    found = [post(engine, "/v1/embeddings", body).json() for _ in range(2)]
    assert found[0]["data"] == found[1]["data"]
    first, second = (item["embedding"] for item in found[0]["data"])
    assert first != second
    assert math.isclose(math.hypot(*first), 1.0)
    assert found[0]["usage"]["prompt_tokens"] == found[0]["usage"]["total_tokens"] > 3
    assert post(engine, COMPLETIONS, completion()).status_code == 404
    tokens = found[0]["usage"]["prompt_tokens"]
    engine.wait_for(lambda: entries(engine)[-1].tokens.prompt == tokens, "the entry", GUARD_S)


def test_an_api_key_is_needed_where_vllm_needs_it(start: StartSimulated) -> None:
    engine = start(environment={"VLLM_API_KEY": "secret"})
    assert post(engine, COMPLETIONS, completion()).status_code == 401
    allowed = {"Authorization": "Bearer secret"}
    assert post(engine, COMPLETIONS, completion(), headers=allowed).status_code == 200


def test_an_option_that_vllm_refuses_ends_the_start(start: StartSimulated) -> None:
    engine = start(wait=False, engine={"options": {"max-logprobs": "many"}})
    assert engine.wait_end() == EXIT_CODES[DeathClass.BAD_ENGINE_OPTION]
    line = engine.termination()
    assert (line["class"], line["phase"]) == ("BadEngineOption", "start")
    assert "max-logprobs" in line["message"]
