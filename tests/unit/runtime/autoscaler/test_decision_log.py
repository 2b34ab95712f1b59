"""The log has one line for each decision that changed something, in the words of `fleetkeeper explain`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from fleetkeeper.fleet.view import view_of
from fleetkeeper.runtime.queue import Key
from tests.support.autoscale.control_cases import reported_status
from tests.support.autoscale.loop_world import World

FULL = {"minSequences": 32, "maxSequences": 32, "mode": "Fixed"}
LATE = {"wait_sum_s_standard": 16.0, "wait_within_standard": 0.0, "arrivals_batch": 1.0}
FIELDS = {
    "event",
    "log_level",
    "namespace",
    "service",
    "subject",
    "from",
    "to",
    "reason",
    "why",
    "words",
    "queue_wait_s",
    "queue_wait_objective_s",
    "batch_time_s",
    "batch_time_objective_s",
}


def decisions(lines: list[Any]) -> list[dict[str, Any]]:
    """Return the lines of decisions."""
    return [line for line in lines if line["event"] == "decision"]


def explained(world: World, key: Key) -> list[str]:
    """Return the decisions as `fleetkeeper explain` shows them, oldest first."""
    status = reported_status(world.loop.view(key).control_report)
    meta = {"namespace": key.namespace, "name": key.name}
    return [
        change.in_words() for change in view_of({"metadata": meta, "status": status}, {}).changes
    ]


def moves_of(lines: list[Any], breaker: str) -> list[tuple[str, str, str]]:
    """Return from, to and reason of each line of a breaker."""
    return [
        (line["from"], line["to"], line["reason"])
        for line in decisions(lines)
        if line["from"].startswith(f"{breaker} ")
    ]


def measured(status: Mapping[str, Any], section: str) -> tuple[str, str]:
    """Return reason and message of a section of the status."""
    return status[section]["reason"], status[section]["message"]


async def test_a_scale_up_is_one_line_with_what_it_was_decided_on() -> None:
    """Queue wait above its objective: from, to, reason, and both measurements with their objectives."""
    world = World()
    key = world.add_service(replicas=1, batching=FULL)
    with capture_logs() as lines:
        await world.ticks(24, **LATE)
    scaled = [line for line in decisions(lines) if line["subject"] == "replicas"]
    assert len(scaled) == 1
    line = scaled[0]
    assert line.keys() == FIELDS
    assert (line["namespace"], line["service"], line["from"]) == ("team-a", "chat", "1")
    assert line["queue_wait_s"] > line["queue_wait_objective_s"] == 0.5
    assert 0 < line["batch_time_s"] < line["batch_time_objective_s"] == 0.05
    status = reported_status(world.loop.view(key).control_report)
    assert line["to"] == str(status["scaling"]["desired"])
    assert (line["reason"], line["why"]) == measured(status, "scaling")


async def test_the_words_are_those_of_explain() -> None:
    """Each entry of status.decisions has its line, in the same order and words."""
    world = World()
    key = world.add_service(replicas=1, batching=FULL)
    with capture_logs() as lines:
        await world.ticks(24, **LATE)
    words = [line["words"] for line in decisions(lines)]
    assert len(words) >= 2
    assert sorted(words) == sorted(explained(world, key))


async def test_a_service_at_rest_writes_no_line() -> None:
    """Neither the first ticks nor a settled minute decide a change."""
    world = World()
    world.add_service()
    with capture_logs() as lines:
        await world.ticks(2)
    assert not decisions(lines)
    await world.ticks(12)
    with capture_logs() as lines:
        await world.ticks(12)
    assert lines == []


async def test_a_new_leader_repeats_no_decision() -> None:
    """What the previous leader decided and wrote to the status is not decided again."""
    world = World()
    key = world.add_service(replicas=1, batching=FULL)
    await world.ticks(24, **LATE)
    status = reported_status(world.loop.view(key).control_report)
    open_tiers = {tier for tier, state in status["breaker"]["load"].items() if state == "Open"}
    assert open_tiers
    world.put_service(status=status, batching=FULL)
    world.set_replicas("chat", status["scaling"]["desired"])
    world.loop = world.new_leader()
    with capture_logs() as lines:
        await world.ticks(1, **LATE)
    assert not decisions(lines)


async def test_shedding_has_a_line_when_it_begins_and_ends_and_none_for_a_share() -> None:
    """The share of batch that is admitted moves in between, and only the engines are told."""
    world = World()
    world.add_service(replicas=1, batching={**FULL, "mode": "Auto"})
    with capture_logs() as lines:
        await world.ticks(24, **LATE)
    assert moves_of(lines, "batch") == [("batch Closed", "batch Open", "LoadBreakerOpen")]
    admitted = len({put.admission.admit for put in world.puts})
    with capture_logs() as lines:
        # Means fall as counts rise: an engine whose counters go back counts as new.
        await world.ticks(24, **LATE, wait_count_standard=400.0, batch_time_count=50.0)
    assert moves_of(lines, "batch") == [
        ("batch Open", "batch HalfOpen", "LoadBreakerHalfOpen"),
        ("batch HalfOpen", "batch Closed", "LoadBreakerClosed"),
    ]
    assert len({put.admission.admit for put in world.puts}) > admitted + 1


async def test_lost_signals_are_a_line_without_invented_figures() -> None:
    """The control breaker opens; what was not measured is null, not 0."""
    world = World()
    key = world.add_service(replicas=3)
    await world.ticks(10)
    world.lost = frozenset({key})
    with capture_logs() as lines:
        for _ in range(60):
            world.samples.clear()
            await world.loop.tick()
            world.clock += 5.0
    by_move = {(line["from"], line["to"]): line for line in decisions(lines)}
    control = by_move["control Closed", "control Open"]
    assert (control["reason"], control["queue_wait_s"], control["batch_time_s"]) == (
        "ControlBreakerOpen",
        None,
        None,
    )
    assert by_move["source Closed", "source Open"]["reason"] == "PrometheusLost"
    assert len([line for line in decisions(lines) if "control" in line["from"]]) == 1


async def test_a_suspension_is_one_line() -> None:
    """spec.suspend takes the replicas away, and the log says on whose wish."""
    world = World()
    world.add_service(replicas=2)
    await world.ticks(4)
    world.put_service(suspend=True)
    with capture_logs() as lines:
        await world.ticks(4)
        world.set_replicas("chat", 0)
        await world.ticks(4)
    suspended = [line for line in decisions(lines) if line["subject"] == "replicas"]
    assert [(line["from"], line["to"], line["reason"]) for line in suspended] == [
        ("2", "0", "Suspended")
    ]


SCRIPT = """
import asyncio, sys
from fleetkeeper.runtime.telemetry.logs import configure_logs
from tests.support.autoscale.loop_world import World
configure_logs("info", sys.argv[1])
async def main():
    world = World()
    world.add_service(replicas=1, batching={"minSequences": 32, "maxSequences": 32, "mode": "Fixed"})
    await world.ticks(24, wait_sum_s_standard=16.0, wait_within_standard=0.0)
asyncio.run(main())
"""


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_line_can_be_parsed_in_both_formats(style: str) -> None:
    """JSON has one object a line; the console's lines are key=value, quoted where a value has spaces."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, style],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = [line for line in done.stderr.splitlines() if "subject" in line and "replicas" in line]
    assert len(found) == 1
    if style == "json":
        fields = json.loads(found[0])
        assert fields["event"] == "decision"
    else:
        fields = dict(part.split("=", 1) for part in shlex.split(found[0]) if "=" in part)
    assert fields["from"] == "1"
    assert fields["service"] == "chat"
    assert float(fields["queue_wait_s"]) > float(fields["queue_wait_objective_s"])
    assert fields["words"].startswith("replicas 1 -> ")
