"""The time since the last request of a user, as the supervisor sees it in shared memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleetkeeper_engine.shm.layout import MiddlewareBlock, Outcome, SchedulerBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.supervisor.control_api.metrics import render_metrics
from fleetkeeper_engine.supervisor.idle import Activity, decide_activity
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.state import PodState
from tests.support.engine.engine_documents import a_document

QUIET = MiddlewareBlock(arrivals=(0, 7, 0), outcomes=(0,) * 5 + (7,) + (0,) * 9)
EMPTY = SchedulerBlock()

Seen = tuple[float, SchedulerBlock | None, MiddlewareBlock | None]


def refused(outcome: Outcome) -> tuple[int, ...]:
    counts = list(QUIET.outcomes)
    counts[len(Outcome) + outcome] += 1
    return tuple(counts)


def observed(*seen: Seen, started: bool = True) -> Activity:
    activity = Activity()
    for now, scheduler, middleware in seen:
        activity = decide_activity(activity, scheduler, middleware, now, started=started)
    return activity


def test_an_engine_without_requests_is_idle_since_its_start() -> None:
    assert observed((100.0, EMPTY, QUIET), (160.0, EMPTY, QUIET)).idle_s(190.0) == 90.0


def test_the_start_and_its_probes_are_no_idle_time() -> None:
    """A model takes minutes to load: the pod is not idle for as long when it becomes ready."""
    starting = observed((0.0, SchedulerBlock(running=(0, 1, 0)), QUIET), started=False)
    assert starting.idle_s(600.0) == 0.0
    started = decide_activity(starting, EMPTY, QUIET, 600.0, started=True)
    later = decide_activity(started, EMPTY, QUIET, 630.0, started=True)
    assert later.idle_s(630.0) == 30.0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"arrivals": (0, 8, 0)}, id="arrived"),
        pytest.param(
            {"outcomes": refused(Outcome.QUEUE_FULL)}, id="a retry that found a full queue"
        ),
        pytest.param({"outcomes": refused(Outcome.TIER_CLOSED)}, id="a retry of a closed tier"),
    ],
)
def test_a_request_that_is_over_between_two_reads_counts(change: dict[str, object]) -> None:
    after = replace(QUIET, **change)  # type: ignore[arg-type]
    activity = observed((0.0, EMPTY, QUIET), (500.0, EMPTY, after), (510.0, EMPTY, after))
    assert activity.idle_s(510.0) == 10.0


@pytest.mark.parametrize(
    ("scheduler", "middleware"),
    [
        pytest.param(EMPTY, replace(QUIET, released=(0, 1, 0)), id="runs"),
        pytest.param(EMPTY, replace(QUIET, waiting=(0, 0, 1)), id="waits"),
        pytest.param(SchedulerBlock(running=(1, 0, 0)), QUIET, id="runs in vLLM alone"),
        pytest.param(SchedulerBlock(waiting=(0, 1, 0)), QUIET, id="waits in vLLM alone"),
        pytest.param(EMPTY, None, id="unknown"),
    ],
)
def test_an_engine_with_a_request_is_not_idle_until_it_ended(
    scheduler: SchedulerBlock, middleware: MiddlewareBlock | None
) -> None:
    before: Seen = (0.0, EMPTY, QUIET)
    during = observed(before, (300.0, scheduler, middleware), (900.0, scheduler, middleware))
    assert during.idle_s(900.0) == 0.0
    ended = decide_activity(during, EMPTY, QUIET, 901.0, started=True)
    assert decide_activity(ended, EMPTY, QUIET, 931.0, started=True).idle_s(931.0) == 30.0


def test_a_restarted_api_server_is_not_idle_for_the_time_of_the_one_before() -> None:
    """Its counters begin at 0, and what it did not finish is unknown."""
    new = MiddlewareBlock()
    activity = observed((0.0, EMPTY, QUIET), (400.0, EMPTY, new), (405.0, EMPTY, new))
    assert activity.idle_s(405.0) == 5.0


def test_the_metrics_have_the_idle_time(tmp_path: Path) -> None:
    pod = PodState(a_document(), Region.create(tmp_path / "region"), MemoryState(0.8))
    assert idle_line(pod, 50.0) == "0.0", "nothing was seen yet"
    pod.region.write_middleware(QUIET)
    pod.started = True
    for now in (100.0, 130.5):
        pod.observe(now)
    assert idle_line(pod, 142.5) == "42.5"


def idle_line(pod: PodState, now: float) -> str:
    text = render_metrics(pod, (), now, None).decode()
    (line,) = (row for row in text.splitlines() if row.startswith("fleetkeeper_idle_seconds "))
    return line.split()[1]
