"""80% of the pod: planned, measured every 100 ms under full load, and what happens above it."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from supervised_engine import GIB, RunningEngine, StartEngine

pytestmark = pytest.mark.timeout(1200)
FULL = 64
PROMPT = list(range(5, 805))


def full_load(engine: RunningEngine) -> None:
    """All 64 sequences at once, with prompts that fill the largest steps."""
    with ThreadPoolExecutor(FULL) as pool:
        prompts = ([5 + number, *PROMPT] for number in range(FULL))
        answers = [pool.submit(engine.complete, 32, prompt=prompt) for prompt in prompts]
        assert {answer.result().status_code for answer in answers} == {200}


def assert_within_cap(engine: RunningEngine, pod_gib: int) -> None:
    metrics = engine.metrics()
    peak, cap = metrics["fleetkeeper_memory_peak_ratio"], metrics["fleetkeeper_memory_cap_ratio"]
    print(f"pod of {pod_gib} GiB: peak {100 * peak:.1f}%, cap {100 * cap:.0f}%")
    assert metrics["fleetkeeper_memory_over_cap"] == 0
    assert peak * pod_gib > 1.5, "vLLM alone takes so much: it was measured"
    assert peak <= cap == 0.8


def test_a_pod_of_2_gib_is_refused_with_the_sum(start: StartEngine) -> None:
    """vLLM's own processes take 1.9 GiB: no cache is left below 80%."""
    began = time.monotonic()
    engine = start(sections={"memory": {"limitBytes": 2 * GIB}}, pod_bytes=2 * GIB)
    assert engine.wait_end(60) == 71
    line = engine.termination()
    assert (line["class"], line["code"], line["phase"]) == ("HostOutOfMemory", 71, "plan")
    assert "weights 0.01 GiB + base" in line["message"]
    assert "> 80% of 2.00 GiB" in line["message"]
    assert "raise resources.memory to at least" in line["message"]
    assert time.monotonic() - began < 30, "refused before vLLM was started"


def test_a_pod_of_4_gib_stays_within_80_percent_under_full_load(engine: RunningEngine) -> None:
    full_load(engine)
    assert_within_cap(engine, 4)


@pytest.mark.parametrize("pod_gib", [3, 6])
def test_pods_of_3_and_6_gib_stay_within_80_percent_under_full_load(
    start: StartEngine, pod_gib: int
) -> None:
    engine = start(sections={"memory": {"limitBytes": pod_gib * GIB}}, pod_bytes=pod_gib * GIB)
    engine.wait_ready()
    full_load(engine)
    assert_within_cap(engine, pod_gib)
    assert engine.stop() == 0


def hold_memory(size: int, group: str, held: Event, release: Event) -> None:
    (Path(group) / "cgroup.procs").write_text("0")
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    held.set()
    release.wait(120)


def test_above_the_cap_new_sequences_stop_and_come_back_below_it(engine: RunningEngine) -> None:
    """Another process of the pod takes memory: told within 15 s; what runs ends; then all is well again."""
    if engine.cgroup is None:
        pytest.skip("needs the right to make a memory cgroup")
    used = engine.metrics()["fleetkeeper_memory_used_ratio"]
    size = int((0.86 - used) * 4 * GIB)
    spawn = multiprocessing.get_context("spawn")
    held, release = spawn.Event(), spawn.Event()
    hog = spawn.Process(target=hold_memory, args=(size, str(engine.cgroup), held, release))
    began = time.monotonic()
    hog.start()
    try:
        assert held.wait(60)
        engine.wait_for(
            lambda: engine.metrics()["fleetkeeper_memory_over_cap"] == 1, "over cap", 30
        )
        assert time.monotonic() - began >= 10, "a short peak stops nothing"
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(engine.complete, 4)
            engine.wait_for(
                lambda: engine.metrics()['fleetkeeper_waiting{tier="standard"}'] == 1,
                "it waits",
                10,
            )
            time.sleep(2)
            assert not refused.done()
            assert engine.metrics()['fleetkeeper_running{tier="standard"}'] == 0
            assert engine.health("live") == 200
            release.set()
            engine.wait_for(
                lambda: engine.metrics()["fleetkeeper_memory_over_cap"] == 0, "below the cap", 10
            )
            assert refused.result(30).status_code == 200
    finally:
        release.set()
        hog.join(30)
    assert "new sequences stop" in engine.log
    assert "new sequences are taken again" in engine.log
