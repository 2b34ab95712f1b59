"""What the benchmark of sleeping services counts: sleeps, wakes, and how long an order takes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = pytest.mark.exhaustive
Part = Callable[[str], ModuleType]


def test_only_requests_that_woke_a_service_count_for_the_times(part: Part) -> None:
    sleep = part("sleep")
    replicas, starts = sleep.Replicas(), sleep.Starts()
    replicas.changes = {
        "a": [(0.0, 1), (50.0, 0), (100.5, 1), (200.0, 0)],
        "a-fk-router": [(0.0, 1)],
    }
    starts.ready = {"uid": ("a", 100.0, 106.0)}
    answers = [
        sleep.Answered("a", 100.0, 107.0, 200, ""),
        sleep.Answered("a", 103.0, 107.0, 200, ""),
        sleep.Answered("a", 150.0, 151.0, 503, "service_waking"),
    ]
    text, table = sleep.report(answers, 3, replicas, starts, ["a"])
    assert text.startswith("2 sleeps and 1 wakes of 1 services. A pod starts in 6.0 s (6.0)")
    assert text.endswith("Failed requests: 503 service_waking.")
    assert "| Poisson | 3 | 1 | 0.5 s (0.5) | 7.0 s (7.0) | 1.0 s (1.0) |" in table
    assert "| all at once | 0 | 0 | - | - | - |" in table


def test_a_deployment_that_is_not_there_yet_does_not_count_as_asleep(part: Part) -> None:
    replicas = part("sleep").Replicas()
    assert replicas.present("a") == -1
    replicas.changes = {"a": [(1.0, 1), (2.0, 0)]}
    assert replicas.present("a") == 0
