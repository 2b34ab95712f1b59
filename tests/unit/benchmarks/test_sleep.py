"""What the benchmark of sleeping services counts: sleeps, wakes, and how long an order takes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = pytest.mark.exhaustive
Part = Callable[[str], ModuleType]


def test_only_requests_that_woke_a_service_count_for_the_times(part: Part) -> None:
    sleep = part("sleep")
    replicas, steps = sleep.Replicas(), sleep.Steps()
    replicas.changes = {
        "a": [(0.0, 1), (50.0, 0), (100.5, 1), (200.0, 0)],
        "a-fk-router": [(0.0, 1)],
    }
    for at, step, uid in [
        (1.0, "engine ready", "old"),
        (101.5, "engine address", "uid"),
        (104.5, "engine ready", "uid"),
        (106.5, "endpoint", "slice"),
        (108.0, "router ready", "late"),
    ]:
        assert steps.note("a", step, at, uid=uid)
    assert not steps.note("a", "engine ready", 105.0, uid="uid")
    steps.starts = [6.0]
    answers = [
        sleep.Answered("a", 100.0, 107.0, 107.5, 200, ""),
        sleep.Answered("a", 103.0, 107.0, 107.5, 200, ""),
        sleep.Answered("a", 150.0, 151.0, 151.0, 503, "service_waking"),
    ]
    text, table, parts = sleep.report(answers, 3, replicas, steps, ["a"])
    assert text.startswith("2 sleeps and 1 wakes of 1 services. A pod starts in 6.0 s (6.0)")
    assert text.endswith("Failed requests: 503 service_waking.")
    assert "| Poisson | 3 | 1 | 0.5 s (0.5) | 7.0 s (7.0) | 2.5 s (2.5) |" in table
    assert "| all at once | 0 | 0 | - | - | - |" in table
    row = "| Poisson | 1.0 s (1.0) | - | 4.0 s (4.0) | - | 6.0 s (6.0) | 6.5 s (6.5) |"
    assert row in parts, "a step after the answer is not of its start"


def test_a_deployment_that_is_not_there_yet_does_not_count_as_asleep(part: Part) -> None:
    replicas = part("sleep").Replicas()
    assert replicas.present("a") == -1
    replicas.changes = {"a": [(1.0, 1), (2.0, 0)]}
    assert replicas.present("a") == 0
