"""80% of the pod: planned, measured every 100 ms under full load, and what happens above it."""

from __future__ import annotations

import multiprocessing
import re
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tests.support.engine.supervised_engine import (
    GIB,
    RunningEngine,
    StartEngine,
    assert_within_cap,
    full_load,
)
from tests.support.guards import GUARD_S

pytestmark = pytest.mark.timeout(1200)


def test_a_pod_of_2_gib_is_refused_with_the_sum(start: StartEngine) -> None:
    """vLLM's own processes take 1.9 GiB: no cache is left below 80%."""
    engine = start(sections={"memory": {"limitBytes": 2 * GIB}}, pod_bytes=2 * GIB)
    assert engine.wait_end() == 71
    line = engine.termination()
    assert (line["class"], line["code"], line["phase"]) == ("HostOutOfMemory", 71, "plan")
    assert "weights 0.01 GiB + base" in line["message"]
    assert "> 80% of 2.00 GiB" in line["message"]
    assert "raise resources.memory to at least" in line["message"]
    assert "starting vLLM" not in engine.log


@pytest.mark.promise("memory-cap", "neighbor-memory")
def test_a_pod_of_4_gib_stays_within_80_percent_under_full_load(engine: RunningEngine) -> None:
    """Pods of 3 and 6 GiB are looked at in test_drain.py."""
    full_load(engine)
    assert_within_cap(engine, 4)


def hold_memory(size: int, group: str, held: Event, release: Event) -> None:
    (Path(group) / "cgroup.procs").write_text("0")
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    held.set()
    release.wait(120)


@pytest.mark.promise("memory-cap")
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
        engine.wait_for(lambda: engine.metrics()["fleetkeeper_memory_over_cap"] == 1, "over cap")
        assert time.monotonic() - began >= 10, "a short peak stops nothing"
        with ThreadPoolExecutor(1) as pool:
            refused = pool.submit(engine.complete, 4)
            engine.wait_for(
                lambda: engine.metrics()['fleetkeeper_waiting{tier="standard"}'] == 1,
                "it waits",
            )
            time.sleep(2)
            assert not refused.done()
            assert engine.metrics()['fleetkeeper_running{tier="standard"}'] == 0
            assert engine.health("live") == 200
            release.set()
            engine.wait_for(
                lambda: engine.metrics()["fleetkeeper_memory_over_cap"] == 0, "below the cap"
            )
            assert refused.result(GUARD_S).status_code == 200
    finally:
        release.set()
        hog.join(30)

    def above_then_below() -> bool:
        changes = re.findall(r"memory ([\d.]+)%, cap (\d+)%", engine.log)
        return [float(used) > float(cap) for used, cap in changes[-2:]] == [True, False]

    engine.wait_for(above_then_below, "the log has both changes")
