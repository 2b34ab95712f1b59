"""A backlog in the simulator: it is done in time with as few replicas as that needs, beside the users."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest

from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.arguments import parse_batches
from fleetkeeper.simulate.autoscalers import ControlLoop
from fleetkeeper.simulate.batch_client import BatchClient, BatchLine, batch_client
from fleetkeeper.simulate.batch_figures import BatchEnd, batch_end
from fleetkeeper.simulate.closed_loop import EPOCH_S, Fault, Scenario, run
from fleetkeeper.simulate.cluster import Cluster, ColdStart
from fleetkeeper.simulate.engine import H100_8B, H100_70B
from fleetkeeper.simulate.loads.arrivals import Mix, poisson
from fleetkeeper.simulate.loads.patterns import Pattern, rate_of
from fleetkeeper.simulate.outcome import Outcome
from fleetkeeper.simulate.requests import Request
from tests.support.lanes import keep_first

pytestmark = pytest.mark.slow

SETTINGS = ControlSettings(max_replicas=8)
LINE = Mix(1000.0, 200.0)


def scene(
    seconds: float,
    *batches: str,
    rate: float = 4.0,
    pattern: Pattern = Pattern.CONSTANT,
    settings: ControlSettings = SETTINGS,
    seed: int = 1,
) -> Scenario:
    """Chat on 70B: a replica carries about 8 requests/s. A cold start takes two minutes."""
    return Scenario(
        seconds,
        poisson(rate_of(pattern, rate, seconds), rate, LINE),
        lambda: ControlLoop(settings),
        H100_70B,
        replicas=settings.min_replicas,
        cold_start=ColdStart(120.0),
        batches=parse_batches(batches),
        line=LINE,
        seed=seed,
    )


def played(scenario: Scenario) -> tuple[Outcome, list[BatchEnd]]:
    """What users saw, and when the batches ended."""
    outcome, _ = run(scenario)
    return outcome, [batch_end(work, scenario.seconds) for work in outcome.works]


def added(outcome: Outcome) -> int:
    """The replicas that were added for a deadline."""
    rows = pairwise(outcome.ticks)
    return sum(
        max(0, b.replicas - a.replicas)
        for a, b in rows
        if b.decision is not None and b.decision.replicas.reason == "BatchDeadline"
    )


@pytest.mark.parametrize("seed", keep_first(1, [1, 7], pytest.mark.exhaustive))
def test_a_backlog_that_is_in_time_takes_no_replica(seed: int) -> None:
    """Half a replica is free for an hour and a half. The number is that of the same hours without it."""
    quiet, _ = run(scene(5400.0, seed=seed))
    outcome, (end,) = played(scene(5400.0, "5M@90m", seed=seed))
    assert end.late_s < 0
    assert added(outcome) == 0
    assert outcome.most_replicas == quiet.most_replicas
    assert outcome.gpu_hours <= 1.02 * quiet.gpu_hours


@pytest.mark.parametrize("seed", keep_first(1, [1, 7], pytest.mark.exhaustive))
def test_a_deadline_adds_replicas_that_go_again(seed: int) -> None:
    """Without them it would be missed. Each comes once, and the fleet is small again after the end."""
    fixed = replace(SETTINGS, max_replicas=1)
    _, (without,) = played(scene(9000.0, "30M@60m", seed=seed, settings=fixed))
    outcome, (end,) = played(scene(9000.0, "30M@60m", seed=seed))
    assert not without.late_s <= 0
    assert end.late_s <= 0
    assert added(outcome) >= 1
    assert outcome.reversals() <= 1
    assert outcome.ticks[-1].replicas == 1


def test_users_are_served_as_without_the_backlog() -> None:
    """Their requests come first; the lines fill what they leave."""
    quiet, _ = run(scene(3600.0))
    outcome, _ = played(scene(3600.0, "10M@60m"))
    assert outcome.arrivals == quiet.arrivals
    assert outcome.attainment >= quiet.attainment - 0.03
    assert outcome.wait_attainment >= quiet.wait_attainment - 0.03


def test_more_than_all_replicas_can_do_takes_all_and_is_missed() -> None:
    settings = replace(SETTINGS, max_replicas=2)
    outcome, (end,) = played(scene(2400.0, "50M@20m", settings=settings))
    assert outcome.most_replicas == 2
    assert math.isnan(end.finished_s)
    assert end.late_s == 1200.0
    assert end.left > 0
    last = [tick.decision for tick in outcome.ticks if tick.time < 1200][-1]
    assert last is not None
    assert last.deadline is not None
    assert last.deadline.misses(2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 7])
def test_a_day_with_batches_takes_few_changes_back(seed: int) -> None:
    """A day's curve of users, and batches with windows of hours through it.

    A change is taken back if its opposite follows within an hour: one to four times with seeds 1 to 8,
    mostly at the peak, where the load is between what two and three replicas carry.
    """
    batches = ("60M@6h,1h", "20M@3h,8h", "40M@8h,13h", "20M@1h,20h")
    day = scene(86_400.0, *batches, rate=8.0, pattern=Pattern.DAY, seed=seed)
    outcome, ends = played(day)
    assert all(end.late_s <= 0 for end in ends)
    moves = [
        (b.time, b.replicas - a.replicas)
        for a, b in pairwise(outcome.ticks)
        if a.replicas != b.replicas
    ]
    turns = [
        (before, time) for (before, by), (time, after) in pairwise(moves) if (by > 0) != (after > 0)
    ]
    assert len(turns) <= 2 * len(batches)
    taken_back = [time for before, time in turns if time - before < 3600]
    assert len(taken_back) <= len(batches), moves


def test_without_batches_a_run_is_what_it_was() -> None:
    """A client without work draws nothing and asks nothing."""
    one, _ = run(scene(900.0, rate=12.0))
    two, _ = run(replace(scene(900.0, rate=12.0), line=Mix(9.0, 9.0), batch_tier=1))
    assert [replace(tick, decision=None) for tick in one.ticks[1:]] == [
        replace(tick, decision=None) for tick in two.ticks[1:]
    ]
    assert all(tick.decision is not None and tick.decision.deadline is None for tick in one.ticks)


# -- the client ------------------------------------------------------------------------------------------


def client_on(replicas: int, *batches: str) -> tuple[BatchClient, Cluster]:
    """A client and a cluster that hands over to it."""
    client = batch_client(
        parse_batches(batches), LINE, EPOCH_S, 1, tier=2, longest=H100_8B.blocks * 16
    )

    def end(requests: Iterable[Request]) -> None:
        assert client.others(requests) == []

    cluster = Cluster(H100_8B, Random(1), on_end=end)
    cluster.begin(EPOCH_S, replicas)
    return client, cluster


def test_every_line_ends_once_whatever_crashes() -> None:
    """Lost lines are sent again; the tokens are those of the batch."""
    crashes = tuple(Fault(at, number) for number, at in enumerate((30.0, 95.0, 160.0, 300.0)))
    scenario = replace(scene(1800.0, "2M@30m", rate=1.0), crashes=crashes)
    outcome, (end,) = played(scenario)
    assert end.left == 0
    assert end.late_s < 0
    assert outcome.unfinished == 0
    assert outcome.works[0].left == 0
    assert not outcome.works[0].waiting


def test_the_earliest_deadline_is_first() -> None:
    """The batch that came later but is due sooner ends sooner."""
    _, (long, short) = played(scene(5400.0, "8M@85m", "1M@20m,10m", rate=1.0))
    assert short.late_s < 0
    assert short.finished_s < long.finished_s


def test_the_gauges_are_those_of_the_batch_process() -> None:
    """Tokens without a result; the earliest deadline; the least rate that meets all; nothing at rest."""
    client, cluster = client_on(1, "900k@10m", "300k@5m,1m")
    client.step(cluster, EPOCH_S)
    assert cluster.backlog is not None
    first, second = client.works
    assert cluster.backlog.tokens == first.left
    assert cluster.backlog.tokens_per_s == pytest.approx(first.left / 600)
    client.step(cluster, EPOCH_S + 14)
    assert cluster.backlog.time == EPOCH_S, "scraped every 15 s"
    for second_of_run in range(15, 61):
        client.step(cluster, EPOCH_S + second_of_run)
    backlog = cluster.backlog
    assert backlog.time == EPOCH_S + 60
    assert backlog.deadline == EPOCH_S + 360
    assert backlog.tokens == first.left + second.left
    assert backlog.tokens_per_s == pytest.approx(
        max(second.left / 300, (first.left + second.left) / 540)
    )
    for second_of_run in range(61, 700):
        client.step(cluster, EPOCH_S + second_of_run)
    assert cluster.backlog is None
    assert client.in_flight == 0


def test_refusals_make_the_client_wait_and_send_less() -> None:
    """As long as a tier is closed, one attempt in five seconds."""
    client, cluster = client_on(1, "50M@10h")
    (pod,) = cluster.pods.values()
    for second in range(60):
        client.step(cluster, EPOCH_S + second)
    assert pod.engine is not None
    open_in_flight = client.in_flight
    pod.engine.admit = (1.0, 1.0, 0.0)
    before = Counters._make(pod.engine.counts.counters).arrivals_batch
    for second in range(60, 120):
        client.step(cluster, EPOCH_S + second)
    assert client.in_flight < open_in_flight / 3
    attempts = Counters._make(pod.engine.counts.counters).arrivals_batch - before
    assert 0 < attempts <= 60 / 5 + 1
    pod.engine.admit = (1.0, 1.0, 1.0)
    for second in range(120, 240):
        client.step(cluster, EPOCH_S + second)
    assert client.in_flight > open_in_flight / 2


def test_a_client_has_no_more_lines_than_places() -> None:
    """However many replicas there are: one batch process has 1,024 places, and a key 7/8 of them."""
    client, cluster = client_on(8, "900M@10h")
    most = 0
    for second in range(300):
        client.step(cluster, EPOCH_S + second)
        most = max(most, client.in_flight)
    assert most == 896


def test_lines_have_the_tokens_of_the_load_and_fit_into_an_engine() -> None:
    client, _ = client_on(1, "3M@10h")
    (work,) = client.works
    assert work.left == sum(map(sum, work.waiting))
    assert 3e6 <= work.left < 3.02e6
    assert fmean(prompt for prompt, _ in work.waiting) == pytest.approx(1000, rel=0.1)
    small = batch_client(parse_batches(["10k@1h"]), LINE, 0.0, 1, tier=2, longest=64)
    assert max(map(sum, small.works[0].waiting)) <= 64
    assert isinstance(BatchLine(0.0, 2, (5, 7), work), BatchLine)
