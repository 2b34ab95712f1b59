"""The engine's own verdict: `fleetkeeper_hung` is 1 only while it is stalled beyond its allowance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleetkeeper_engine.devices.interface import DeviceMemory
from fleetkeeper_engine.shm.layout import HeartbeatBlock, MiddlewareBlock, SchedulerBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.control_api.metrics import render_metrics
from fleetkeeper_engine.supervisor.health import NO_ANSWER, NO_STEP
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.state import PodState

STALL_S = 60
RUNNING = SchedulerBlock(supported=True, running=(0, 4, 0), worked_steps=7)
LONG_STEP = HeartbeatBlock(schedule_calls=9, steps=1, tokens=8192)
"""Its tokens may take 4 x 8192 x 0.02 s = 655 s before any pace was measured."""


class Engine:
    """A supervisor's state over a region; time is the test's."""

    def __init__(self, directory: Path) -> None:
        document = {
            "contract": 1,
            "accelerator": "cpu",
            "model": {"source": "/m", "servedName": "m"},
            "batching": {"maxSequences": 64, "maxTokens": 8192},
            "health": {"stallSeconds": STALL_S},
        }
        self.pod = PodState(
            parse_document(json.dumps(document)),
            Region.create(directory / "page"),
            MemoryState(0.8),
        )
        self.pod.started = self.pod.child_alive = True
        self.now = 1000.0

    def stands_still(
        self,
        seconds: int,
        block: SchedulerBlock,
        heartbeat: HeartbeatBlock,
        *,
        calls_move: bool = False,
    ) -> None:
        """One observation a second at an engine that makes no step."""
        self.pod.region.write_scheduler(block)
        for second in range(seconds + 1):
            calls = heartbeat.schedule_calls + second * calls_move
            self.pod.region.write_heartbeat(replace(heartbeat, schedule_calls=calls))
            self.pod.observe(self.now)
            self.now += 1.0

    def shown(self, name: str = "fleetkeeper_hung") -> float:
        """One metric as a scrape shows it."""
        text = render_metrics(self.pod, (), self.now, None).decode()
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_a_step_that_may_last_longer_is_not_hung_however_long_it_is_stalled(engine: Engine) -> None:
    """300 s of one step of 8,192 tokens: no progress, and no hang."""
    engine.stands_still(300, RUNNING, LONG_STEP)
    assert engine.shown("fleetkeeper_stalled_seconds") >= 300
    assert engine.shown() == 0
    assert engine.pod.hang(engine.now) == ""


def test_a_step_beyond_its_allowance_is_hung(engine: Engine) -> None:
    engine.stands_still(654, RUNNING, LONG_STEP)
    assert engine.shown() == 0
    engine.stands_still(3, RUNNING, LONG_STEP)
    assert engine.shown() == 1
    assert engine.pod.hang(engine.now) == NO_STEP


def test_work_without_a_step_in_flight_is_hung_after_the_stall_time(engine: Engine) -> None:
    engine.stands_still(58, RUNNING, HeartbeatBlock(schedule_calls=9))
    assert engine.shown() == 0
    engine.stands_still(2, RUNNING, HeartbeatBlock(schedule_calls=9))
    assert engine.shown() == 1


def test_an_api_server_that_is_silent_is_named(engine: Engine) -> None:
    """Its next answer is due after `SERVER_PERIOD_S`. It is for the probes alone, not for the operator."""
    engine.pod.server_answered = engine.now
    assert engine.pod.readiness(engine.now + 30).obstacles == ()
    assert engine.pod.readiness(engine.now + 31).obstacles == (f"hung: {NO_ANSWER}",)
    assert engine.pod.hang(engine.now + STALL_S + 10) == ""
    assert engine.pod.hang(engine.now + STALL_S + 11) == NO_ANSWER
    assert engine.shown() == 0


def test_an_engine_held_by_its_memory_cap_is_not_hung(engine: Engine) -> None:
    """Requests wait on purpose, for as long as memory is above the cap."""
    for second in range(12):
        engine.pod.observe_memory(DeviceMemory(90, 100), engine.now + second)
    assert engine.pod.memory.over_cap
    waiting = SchedulerBlock(supported=True, waiting=(0, 3, 0), worked_steps=7)
    engine.stands_still(900, waiting, HeartbeatBlock(schedule_calls=9), calls_move=True)
    assert engine.shown() == 0
    engine.stands_still(900, waiting, HeartbeatBlock(schedule_calls=9000))
    assert engine.shown() == 0, "nobody else ends it while it is throttled: its own probe decides"


@pytest.mark.parametrize(
    "block",
    [replace(RUNNING, instrumentation_disabled=True), replace(RUNNING, running=(0, 0, 0))],
    ids=["instrumentation disabled", "idle"],
)
def test_an_engine_without_instrumentation_or_work_is_not_hung(
    engine: Engine, block: SchedulerBlock
) -> None:
    """Blind: requests are answered, and nobody counts them."""
    engine.stands_still(900, block, HeartbeatBlock(schedule_calls=9))
    assert engine.shown() == 0


def test_an_engine_whose_shared_memory_cannot_be_read_is_not_hung(engine: Engine) -> None:
    engine.pod.region.write_middleware(MiddlewareBlock(released=(0, 4, 0)))
    for _ in range(900):
        engine.pod.observe(engine.now)
        engine.now += 1.0
    assert engine.shown() == 0


def test_an_engine_that_still_starts_is_not_hung(engine: Engine) -> None:
    """Its first token may take as long as startupSeconds allows."""
    engine.pod.started = False
    engine.stands_still(900, RUNNING, HeartbeatBlock(schedule_calls=9))
    assert engine.shown() == 0


def test_an_engine_that_moves_again_is_no_longer_hung(engine: Engine) -> None:
    engine.stands_still(90, RUNNING, HeartbeatBlock(schedule_calls=9))
    assert engine.shown() == 1
    engine.stands_still(0, replace(RUNNING, worked_steps=8), HeartbeatBlock(schedule_calls=10))
    assert engine.shown() == 0
