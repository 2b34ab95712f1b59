"""The arithmetic of the serving benchmarks: what counts, what is compared, what the page keeps."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from fleetkeeper_local.load.client import Outcome
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Arrival

pytestmark = pytest.mark.exhaustive


def test_the_page_keeps_the_sections_of_others(part: Callable[[str], ModuleType]) -> None:
    """A section is replaced in its place; a new one comes last."""
    module = part("results_page")
    page = module.with_section(module.with_section("", "One", "1", "# A\n"), "Two", "2", "# A\n")
    again = module.with_section(page, "One", "    new\n\n### Part\n\nx\n", "# A\n")
    assert again == "# A\n\n## One\n\n    new\n\n### Part\n\nx\n\n## Two\n\n2\n"


WATCH_S = 1_767_225_600.0
"""2026-01-01T00:00:00Z."""


def _sample(cause: str, latency_s: float) -> Any:
    outcome = Outcome(not cause, cause, 0, 1, 0.0, None, latency_s, 8)
    return Sample(Arrival(0, 0.0, "p", "batch", "s", 8, 8), outcome, 0.0, 0.0, latency_s)


def test_a_run_of_a_scaler_counts_from_the_step(part: Callable[[str], ModuleType]) -> None:
    """The second pod at 20 s, ready at 60 s; the wait is too long from 10 s to 70 s."""
    module = part("hpa_figures")
    watches = [
        module.Watch(WATCH_S + at_s, 1 + (at_s >= 20), 1 + (at_s >= 60)) for at_s in range(-30, 120)
    ]
    waits = tuple((WATCH_S + at_s, 2.0 if 10 <= at_s < 70 else 0.1) for at_s in range(-30, 120, 2))
    samples = [_sample(cause, 1.0) for cause in ("", "", "http_429", "truncated", "timeout")]
    found = module.outcome_of(
        watches, waits, samples, objective_s=0.5, step_s=WATCH_S, end_s=WATCH_S + 120
    )
    assert (found.order_s, found.ready_s) == (20.0, 60.0)
    assert (found.broken_s, found.restored_s, found.missed_s) == (10.0, 70.0, 60.0)
    assert found.pod_seconds == 20 + 2 * 100
    assert (found.requests, found.failed, found.refused, found.p95_s) == (5, 2, 1, 1.0)


def test_a_wait_that_comes_back_at_the_end_was_not_restored(
    part: Callable[[str], ModuleType],
) -> None:
    """Within the objective for a moment is not within it again."""
    module = part("hpa_figures")
    waits = tuple((float(at_s), 0.1 if at_s in {20, 58, 60} else 2.0) for at_s in range(0, 62, 2))
    assert module.restored_at(waits, 0.5, 0.0) == (0.0, None)
    never = module.Outcome(None, None, 0.0, None, 60.0, 60.0, 9, 0, 0, None)
    row = module.outcome_table({"KEDA": [never]}).splitlines()[-1]
    assert row.startswith("| KEDA | 1 | never | never | 0 s | never | 60 s |")


def test_keda_scales_the_service_and_not_its_deployment(
    part: Callable[[str], ModuleType],
) -> None:
    """The target per replica is the threshold, and no data is not no load."""
    module = part("keda_cluster")
    spec = module.desired_scaled_object(
        "chat", "team", prometheus_url="http://p", query="sum(x)", target=8.0, most=2
    )["spec"]
    assert spec["scaleTargetRef"]["kind"] == "InferenceService"
    assert spec["triggers"][0]["metadata"] == {
        "serverAddress": "http://p",
        "query": "sum(x)",
        "threshold": "8",
        "ignoreNullValues": "false",
    }
