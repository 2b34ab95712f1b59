"""Objectives are judged at bucket boundaries, also when they change."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fleetkeeper.autoscale.signals.histogram_edges import Edges, snap_down
from fleetkeeper.autoscale.signals.pod_history import PodTrack, accept
from fleetkeeper.autoscale.signals.samples import (
    Counters,
    PodSample,
    Source,
)
from fleetkeeper.autoscale.signals.series_map import sample_of
from fleetkeeper.autoscale.types import Grade
from fleetkeeper_contract.histogram_buckets import BATCH_TIME_EDGES_S, QUEUE_WAIT_EDGES_S
from tests.support.autoscale.control_cases import NOW, Loop, sample
from tests.support.autoscale.engine_metrics import metrics_series

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("objective_s", [0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 10.0, 60.0])
def test_objectives_are_snapped_down_to_an_edge(objective_s: float) -> None:
    """Stricter by at most one bucket (1.25x), never laxer."""
    edge = snap_down(objective_s, QUEUE_WAIT_EDGES_S)
    assert edge <= objective_s * (1 + 1e-6)
    assert objective_s <= edge * 1.26


def test_an_objective_below_the_first_edge_is_judged_at_it() -> None:
    """There is no finer bucket."""
    assert snap_down(0.0001, BATCH_TIME_EDGES_S) == BATCH_TIME_EDGES_S[0]


def test_edges_equal_the_engines_contract() -> None:
    """The engine and the operator have the same table."""
    table = json.loads((ROOT / "engine_image/schemas/metrics.json").read_text())
    edges = {row["name"]: tuple(row["edges"]) for row in table["metrics"] if "edges" in row}
    assert edges["fleetkeeper_queue_wait_seconds"] == QUEUE_WAIT_EDGES_S
    assert edges["fleetkeeper_batch_time_seconds"] == BATCH_TIME_EDGES_S


BEFORE = Edges(queue_wait_s=0.5, batch_time_s=0.05)


@pytest.mark.parametrize(
    ("after", "within"),
    [
        (Edges(0.5, 0.02), 5.0),
        (Edges(0.01, 0.05), 25.0),
        (Edges(60.0, 10.0), 25.0),
    ],
)
def test_another_objective_is_no_reset_and_attainment_is_counted_anew(
    after: Edges, within: float
) -> None:
    """Fewer (or more) of the same requests and steps are within: signals stay known, older windows go."""
    loop = Loop()

    def rows(edges: Edges, **per_second: float) -> list[PodSample]:
        return [replace(row, edges=edges) for row in loop.samples(None, **per_second)]

    for _ in range(12):
        signals = loop.tick(rows(BEFORE, batch_time_within=10.0, wait_within_standard=2.0)).signals
    assert len(signals.windows) >= 4
    rates = signals.rates.steps
    changed = loop.tick(rows(after, batch_time_within=within, wait_within_standard=4.0)).signals
    assert changed.rejudged
    assert changed.grade is Grade.FRESH
    assert changed.rates.steps == pytest.approx(rates)
    assert all(value >= 0.0 for value in changed.rates)
    for _ in range(6):
        signals = loop.tick(rows(after, batch_time_within=within, wait_within_standard=4.0)).signals
        assert signals.known
        assert not signals.rejudged
        for window in signals.windows:
            assert window.batch_attainment == pytest.approx(within / 25.0)
    assert 2 <= len(signals.windows) <= 4
    assert not loop.memory.breakers.control.lost


def test_a_pod_read_at_another_edge_is_no_reset() -> None:
    """Through the reader of both sources: the narrower bucket counts fewer, and nothing is left out."""
    narrow = Edges(BEFORE.queue_wait_s / 2, BEFORE.batch_time_s / 2)
    track = PodTrack("chat-0")
    for time, edges in ((NOW, BEFORE), (NOW + 5, BEFORE), (NOW + 10, narrow), (NOW + 15, narrow)):
        series = metrics_series(sample(time), BEFORE)
        read = sample_of("chat-0", time, series, edges, Source.PROMETHEUS)
        assert read.edges == edges
        track = accept(track, read, 0.0, time)
    assert track.out_until == 0.0
    assert len(track.history) == 4


def test_a_reset_is_still_seen_when_the_objective_changes_with_it() -> None:
    """All counters begin again at 0: the pod is left out for its minute."""
    loop = Loop(replicas=1)
    for _ in range(12):
        loop.tick([replace(row, edges=BEFORE) for row in loop.samples()])
    anew = sample(loop.now, origin=loop.now - 5.0)
    assert not loop.tick([replace(anew, edges=Edges(0.5, 0.02))]).signals.known


def test_garbage_under_another_objective_leaves_no_trace() -> None:
    """A refused sample is not what later ones are compared with."""
    loop = Loop(replicas=1)
    for _ in range(12):
        loop.tick([replace(row, edges=BEFORE) for row in loop.samples()])
    before = loop.memory.signals.tracks["chat-0"].history
    bad = replace(loop.samples()[0], edges=Edges(0.5, 0.02), counters=Counters(steps=math.nan))
    loop.tick([bad])
    assert loop.memory.signals.tracks["chat-0"].history == before
    assert loop.tick([replace(row, edges=BEFORE) for row in loop.samples()]).signals.known
