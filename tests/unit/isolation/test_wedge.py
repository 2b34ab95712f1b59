"""An engine that only waits for something else than a step (a grammar, KV from elsewhere) is not wedged."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetkeeper_engine.in_vllm.live_scheduling import LiveScheduling
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.layout import HeartbeatBlock, MiddlewareBlock, SchedulerBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.supervisor.health import (
    Progress,
    decide_progress,
    is_live,
    is_moving,
    stalled_s,
)

Status = IntEnum(
    "Status",
    "WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ"
    " RUNNING PREEMPTED WAITING_FOR_FSM",
)
"""vLLM's statuses of requests that are not finished, the last one of older releases."""

ONE_RELEASED = MiddlewareBlock(released=(0, 1, 0))


def watched(seconds: int, block: SchedulerBlock, *, calls_move: bool = True) -> Progress:
    """One observation a second at a scheduler that makes no step."""
    progress = Progress()
    for second in range(seconds + 1):
        heartbeat = HeartbeatBlock(schedule_calls=10 + second * calls_move)
        progress = decide_progress(progress, block, heartbeat, ONE_RELEASED, float(second))
    return progress


def test_requests_whose_grammar_compiles_are_no_wedge() -> None:
    """Schedule is called and finds nothing that may run, for as long as the grammar takes."""
    progress = watched(600, SchedulerBlock(worked_steps=7, waiting=(0, 1, 0), blocked=1))
    assert stalled_s(progress, 600.0) <= 1.0
    assert is_moving(progress, 600.0, 60.0)
    assert is_live(progress, 600.0, 60.0)


def test_a_request_that_vllm_keeps_apart_from_its_queue_is_no_wedge() -> None:
    """KV from another node: released by the middleware, in neither list of the scheduler."""
    progress = watched(600, SchedulerBlock(worked_steps=7))
    assert is_live(progress, 600.0, 60.0)


@pytest.mark.parametrize(
    "block",
    [
        SchedulerBlock(worked_steps=7, waiting=(0, 2, 0), blocked=1),
        SchedulerBlock(worked_steps=7, running=(0, 1, 0), waiting=(0, 1, 0), blocked=1),
    ],
    ids=["one may start", "one runs"],
)
def test_one_request_that_could_run_beside_a_blocked_one_is_a_wedge(block: SchedulerBlock) -> None:
    progress = watched(61, block)
    assert not is_moving(progress, 61.0, 60.0)
    assert not is_live(progress, 61.0, 60.0)


def test_a_step_that_never_comes_back_is_a_wedge_beside_blocked_requests() -> None:
    """What is under way is work, whatever waits."""
    block = SchedulerBlock(worked_steps=7, waiting=(0, 1, 0), blocked=1)
    progress = Progress()
    for second in range(62):
        heartbeat = HeartbeatBlock(schedule_calls=10 + second, steps=1, tokens=1)
        progress = decide_progress(progress, block, heartbeat, ONE_RELEASED, float(second))
    assert not is_live(progress, 61.0, 60.0)


def test_a_core_that_stops_scheduling_hangs_although_all_its_requests_are_blocked() -> None:
    """A sound core goes on asking whether the grammar is ready."""
    block = SchedulerBlock(worked_steps=7, waiting=(0, 1, 0), blocked=1)
    assert not is_live(watched(61, block, calls_move=False), 61.0, 60.0)


def test_the_clock_of_a_wedge_starts_when_the_grammar_is_ready() -> None:
    """Compiled for ten minutes, then ready: the engine has its whole patience for the first step."""
    blocked = SchedulerBlock(worked_steps=7, waiting=(0, 1, 0), blocked=1)
    ready = replace(blocked, blocked=0)
    progress = watched(600, blocked)
    for second in range(601, 662):
        heartbeat = HeartbeatBlock(schedule_calls=10 + second)
        progress = decide_progress(progress, ready, heartbeat, ONE_RELEASED, float(second))
        if second < 660:
            assert is_live(progress, float(second), 60.0)
    assert not is_live(progress, 661.0, 60.0)


class Scheduler(SimpleNamespace):
    """The part of vLLM's scheduler that is read after a schedule call."""

    def has_unfinished_requests(self) -> bool:
        """As vLLM's."""
        return bool(self.running or self.waiting)


def scheduler_with(*statuses: Status | None) -> Scheduler:
    """Waiting requests in these states; None: of a release that knows none."""
    requests: list[Any] = [SimpleNamespace(request_id=str(n), priority=0) for n in range(9)]
    waiting = requests[: len(statuses)]
    for request, status in zip(waiting, statuses, strict=True):
        if status is not None:
            request.status = status
    return Scheduler(
        max_num_active_reqs=64,
        max_num_scheduled_tokens=2048,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        cache_config=SimpleNamespace(kv_cache_size_tokens=10_000),
        kv_cache_manager=SimpleNamespace(usage=0.0),
        running=[],
        waiting=waiting,
        requests={},
    )


@pytest.mark.parametrize(
    ("statuses", "blocked"),
    [
        ((), 0),
        ((Status.WAITING, Status.PREEMPTED, None), 0),
        ((Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, Status.WAITING), 1),
        ((Status.WAITING_FOR_REMOTE_KVS, Status.WAITING_FOR_STREAMING_REQ), 2),
        ((Status.WAITING_FOR_FSM,), 1),
    ],
)
def test_the_scheduler_counts_waiting_requests_that_no_step_may_hold_yet(
    tmp_path: Path, statuses: tuple[Status | None, ...], blocked: int
) -> None:
    """All of them wait; those for a grammar, KV from elsewhere or more input are blocked besides."""
    region = Region.create(tmp_path / "page")
    settings = VllmSettings(min_sequences=4, min_tokens=256, max_sequences=64, max_tokens=2048)
    live = LiveScheduling(scheduler_with(*statuses), region, settings, lambda: 1000.0)
    live.before_schedule()
    empty = SimpleNamespace(
        num_scheduled_tokens={}, scheduled_new_reqs=[], total_num_scheduled_tokens=0
    )
    live.after_schedule(empty)
    block = region.read_scheduler()
    assert block is not None
    assert (sum(block.waiting), block.blocked) == (len(statuses), blocked)
    live.record.disable_instrumentation()
    live.publish()
    block = region.read_scheduler()
    assert block is not None
    assert block.blocked == 0
