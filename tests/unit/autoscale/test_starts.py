"""The stages of starts: from the engines' series to a stage, and medians from the pods' times."""

from __future__ import annotations

import math

import pytest

from fleetkeeper.api.status_enums import ReplicaStage
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.signals.series_map import edges_of, sample_of
from fleetkeeper.autoscale.signals.starts import median_seconds, starts_of
from fleetkeeper.autoscale.types import ControlSettings, PodView
from fleetkeeper.common.values import StartProgress

EDGES = edges_of(ControlSettings())


def progress_of(**seconds: float) -> StartProgress | None:
    """The progress of a pod that reported these stages at 1000 s."""
    series = [
        ("fleetkeeper_start_seconds", {"stage": stage}, value) for stage, value in seconds.items()
    ]
    sample = sample_of("chat-0", 1000.0, series, EDGES, Source.DIRECT)
    return starts_of([sample]).get("chat-0")


def test_the_last_stage_that_has_begun_is_the_present_one() -> None:
    """Its seconds say since when."""
    assert progress_of(weights=40.0) == StartProgress(ReplicaStage.WEIGHTS, 960.0)
    assert progress_of(weights=40.0, load=30.0) == StartProgress(ReplicaStage.LOAD, 970.0)
    merged = progress_of(weights=70.0, warm_up=2.0)
    assert merged == StartProgress(ReplicaStage.WARM_UP, 998.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e18])
def test_impossible_seconds_are_no_stage(value: float) -> None:
    """A pod may report anything."""
    assert progress_of(weights=40.0, load=value) is None


def test_a_pod_that_reports_no_stages_has_none() -> None:
    """Engines of an older image."""
    sample = sample_of("chat-0", 1.0, [("fleetkeeper_hung", {}, 0.0)], EDGES, Source.DIRECT)
    assert starts_of([sample]) == {}


def test_medians_are_of_ready_pods_whose_engine_was_not_restarted() -> None:
    """A restart would count the time of the first run as pulling the image."""

    def pod(name: str, scheduled: float, engine: float | None, *, ready: bool = True) -> PodView:
        return PodView(
            name, name, 100.0, ready=ready, scheduled_since=scheduled, engine_since=engine
        )

    pods = (pod("a", 101.0, 111.0), pod("b", 103.0, 143.0), pod("c", 108.0, None))
    assert median_seconds(pods) == {"scheduling": 3.0, "image": 25.0}
    assert median_seconds((*pods, pod("d", 900.0, 990.0, ready=False))) == median_seconds(pods)
    assert median_seconds(()) == {}
