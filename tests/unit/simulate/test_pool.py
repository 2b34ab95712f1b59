"""Many services that sleep on few accelerators: each request has one end, and the budget holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.engine import H100_8B, EngineSpec
from fleetkeeper.simulate.loads.arrivals import Mix, trace
from fleetkeeper.simulate.outcome import quantiles
from fleetkeeper.simulate.pool.comparison import (
    DAY_S,
    Case,
    Kind,
    Setting,
    compare,
    play,
    with_load,
    zipf_rates,
)
from fleetkeeper.simulate.pool.services import COOLDOWN_S, POLL_S, Member
from fleetkeeper.simulate.pool.sleepers import HOLD_S
from fleetkeeper.simulate.pool.world import PATIENCE_S, Tally
from fleetkeeper.simulate.service_model import ServiceModel
from fleetkeeper_contract.sleep import UNKNOWN_START_S
from tests.support.lanes import examples

pytestmark = pytest.mark.slow

START_S = 40.0
ROUTED_S = 1.5
"""The order of a replica, and the time until routers know it."""


def member(
    name: str = "rare",
    arrivals: Sequence[float] = (),
    *,
    start_s: float = START_S,
    idle_s: int = 60,
    awake_s: int = 0,
    engine: EngineSpec = H100_8B,
) -> Member:
    """Return a service with requests at these times, and starts without spread."""
    sleep = {"afterIdleSeconds": idle_s, "minAwakeSeconds": awake_s}
    spec = InferenceServiceSpec.model_validate(
        {"model": {"source": "pvc://models/rare"}, "access": "Gateway", "scaling": {"sleep": sleep}}
    )
    model = ServiceModel(ControlSettings(), engine, ColdStart(start_s), 1, 1, 300.0)
    return Member(("default", name), spec, model, trace([(at, 1, 100, 10) for at in arrivals]))


def played(
    *members: Member,
    gpus: int = 4,
    kind: Kind = Kind.FLEETKEEPER,
    failed: float = 0.0,
    seed: int = 1,
) -> tuple[float, int, list[Tally]]:
    """Play an hour; return the GPU-hours, the most GPUs at once, and the tallies."""
    setting = Setting(Budget(gpus), 3600.0, failed_ratio=failed)
    world, tallies = play(Case(kind, members), setting, seed)
    return world.gpu_s / 3600.0, world.peak_gpus, tallies


def alone(**settings: float) -> Tally:
    """Play one service with one request."""
    (tally,) = played(member(arrivals=[10.0], **settings))[2]  # type: ignore[arg-type]
    return tally


def zipf(count: int, per_day: float, **settings: int) -> tuple[Member, ...]:
    """Return services with Poisson arrivals."""
    members = [member(f"rare-{number:02}", **settings) for number in range(count)]  # type: ignore[arg-type]
    return with_load(members, zipf_rates(count, 1.0, per_day), Mix(100.0, 20.0))


# -- one service ------------------------------------------------------------------------------------


def test_a_held_request_is_answered_once_the_replica_is_ready() -> None:
    tally = alone()
    (wait_s,) = tally.waits_s
    assert (tally.after_hold, tally.wakes, tally.sleeps) == (1, 1, 1)
    assert START_S < wait_s < START_S + ROUTED_S
    assert tally.longest_turn_s == wait_s


def test_a_start_that_is_longer_than_the_hold_needs_another_try() -> None:
    tally = alone(start_s=HOLD_S + 10)
    (wait_s,) = tally.waits_s
    assert (tally.after_hold, tally.after_retry) == (0, 1)
    assert wait_s == pytest.approx(HOLD_S + UNKNOWN_START_S)


def test_a_client_loses_patience() -> None:
    tally = alone(start_s=PATIENCE_S + 60)
    assert (tally.given_up, tally.waits_s) == (1, [])
    assert HOLD_S < tally.longest_turn_s <= PATIENCE_S


def test_requests_of_a_service_that_is_awake_wait_for_nothing() -> None:
    (tally,) = played(member(arrivals=[10.0, 100.0, 110.0]))[2]
    assert (tally.after_hold, tally.at_once, tally.wakes) == (1, 2, 1)


def test_it_sleeps_after_its_idle_time_and_its_least_time_awake() -> None:
    """Within the ticks of the control loop, and the time that gateways need to see it."""
    hours, _, _ = played(member(arrivals=[10.0], idle_s=60))
    longer, _, _ = played(member(arrivals=[10.0], idle_s=60, awake_s=300))
    assert START_S + 60 < 3600 * hours < START_S + 60 + 25
    assert START_S + 300 < 3600 * longer < START_S + 300 + 25


def test_a_request_on_the_way_to_sleep_keeps_the_replica() -> None:
    """The pods are read for some seconds more: one of these arrivals is within them."""
    on_the_way = 0
    for late_s in range(60, 80):
        arrivals = [10.0, 60.0, 60.0 + late_s]
        (tally,) = played(member(arrivals=arrivals))[2]
        waits_s = sorted(tally.waits_s)
        on_the_way += tally.wakes == 1 and 0 < waits_s[0] < 1
        assert tally.given_up == 0
    assert 3 <= on_the_way <= 12


def test_a_queue_limit_sheds_no_held_request() -> None:
    engine = EngineSpec(H100_8B.costs, max_sequences=2, queue_limits=(2, 2, 2))
    (tally,) = played(member(arrivals=[10.0] * 40, engine=engine))[2]
    assert (tally.after_hold, tally.given_up) == (40, 0)
    assert tally.waits_s[-1] > START_S + 2 * ROUTED_S > tally.longest_turn_s + ROUTED_S


def test_starts_that_fail_free_their_accelerators_and_are_repeated_ever_later() -> None:
    """1, 2, 5 and then 10 minutes after the last failure."""
    every_second = [float(at) for at in range(3600)]
    hours, _, (tally,) = played(member(arrivals=every_second), failed=1.0)
    paused_s, expected = 0.0, 0
    for pause_s in (0, 60, 120, 300, *[600] * 9):
        paused_s += pause_s + START_S
        expected += paused_s < 3600
    assert tally.failed_starts == tally.wakes == expected
    assert 3600 * hours == pytest.approx(expected * START_S, abs=expected * 2)
    assert tally.sleeps == 0
    assert tally.given_up == tally.requests == 3600


def test_a_wake_waits_for_the_budget_until_another_service_sleeps() -> None:
    first, second = member("a", [10.0]), member("b", [20.0])
    _, most, (_, waits) = played(first, second, gpus=1)
    assert most == 1
    assert waits.wakes == 1
    assert 60 < waits.budget_wait_s < 110
    assert waits.waking_s == pytest.approx(waits.budget_wait_s + START_S, abs=2)
    _, most, (_, free) = played(first, second, gpus=2)
    assert most == 2
    assert free.budget_wait_s == 0.0


@pytest.mark.parametrize(
    ("awake_s", "earliest_s", "latest_s"), [(0, 20.0, 80.0), (300, 290.0, 350.0)]
)
def test_an_idle_service_sleeps_early_for_one_that_wakes(
    awake_s: int, earliest_s: float, latest_s: float
) -> None:
    """Both have the same tier, so `minAwakeSeconds` count. The idle time of 900 s does not."""
    first = member("a", [10.0], idle_s=900, awake_s=awake_s)
    second = member("b", [60.0], idle_s=900, awake_s=awake_s)
    _, most, (_, waits) = played(first, second, gpus=1)
    assert most == 1
    assert waits.wakes == 1
    assert earliest_s < waits.budget_wait_s < latest_s


def test_the_service_that_has_been_idle_for_longest_sleeps_early() -> None:
    """The starts are equal. The other one still has a replica for its next request."""
    long, short = member("a", [10.0], idle_s=900), member("b", [11.0, 300.0, 500.0], idle_s=900)
    _, _, (_, tally, waits) = played(long, short, member("c", [400.0], idle_s=900), gpus=2)
    assert waits.after_hold + waits.after_retry == 1
    assert tally.wakes == 1
    assert tally.at_once == 2


def test_the_wake_that_waits_longest_is_first() -> None:
    """The names say otherwise."""
    members = [member(name, [at]) for name, at in (("c", 10.0), ("b", 20.0), ("a", 30.0))]
    _, _, tallies = played(*members, gpus=1)
    first, second, third = (tally.budget_wait_s for tally in tallies)
    assert 0 <= first < second < third


def test_without_a_hold_clients_repeat_until_a_poll_started_the_replica() -> None:
    hours, _, (tally,) = played(member(arrivals=[10.0]), kind=Kind.KEDA)
    (wait_s,) = tally.waits_s
    assert (tally.after_hold, tally.after_retry, tally.sleeps) == (0, 1, 1)
    assert abs(3600 * hours - START_S - COOLDOWN_S) < 2 * POLL_S
    assert START_S < wait_s < START_S + POLL_S + 8 + ROUTED_S


# -- many services ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
@examples(40)
@given(
    per_day=st.sampled_from([50.0, 2000.0, 20_000.0]),
    gpus=st.integers(1, 4),
    failed=st.sampled_from([0.0, 0.3]),
    seed=st.integers(1, 1000),
)
def test_each_request_ends_once_within_the_budget(
    kind: Kind, per_day: float, gpus: int, failed: float, seed: int
) -> None:
    members = zipf(6, per_day)
    hours, most, tallies = played(*members, gpus=gpus, kind=kind, failed=failed, seed=seed)
    for tally in tallies:
        ends = (tally.at_once, tally.after_hold, tally.after_retry, tally.given_up)
        assert sum(ends) == tally.requests
        assert (
            0 <= tally.wakes - tally.sleeps - tally.failed_starts <= 1
            or kind is not Kind.FLEETKEEPER
        )
        assert tally.budget_wait_s <= tally.waking_s
        assert all(0 < wait_s <= PATIENCE_S for wait_s in tally.waits_s)
        if kind is Kind.FLEETKEEPER or tally.requests == 0:
            assert tally.wakes <= tally.requests
    assert kind is Kind.ALWAYS_ON or most <= gpus
    assert hours <= most


def test_always_on_costs_all_services_all_the_time() -> None:
    hours, most, tallies = played(*zipf(6, 2000.0), gpus=1, kind=Kind.ALWAYS_ON)
    assert hours == pytest.approx(6.0)
    assert most == 6
    assert all(tally.at_once == tally.requests for tally in tallies)


def test_the_same_seed_gives_the_same_run_and_the_same_requests_to_all() -> None:
    members = zipf(6, 5000.0)
    runs = [played(*members, gpus=2, kind=kind) for kind in (*Kind, *Kind)]
    assert runs[:3] == runs[3:]
    assert len({tuple(tally.requests for tally in tallies) for _, _, tallies in runs}) == 1
    assert played(*members, gpus=2, seed=2)[2] != played(*members, gpus=2)[2]


def test_more_accelerators_answer_no_fewer_requests() -> None:
    """Within noise: the starts of a run with more accelerators are other draws."""
    case = Case(Kind.FLEETKEEPER, zipf(8, 6000.0))
    settings = [Setting(Budget(gpus), 3600.0, seeds=2) for gpus in (1, 2, 4, 8)]
    up = [compare([case], setting)[0].figures["given_up"].median for setting in settings]
    assert all(more <= fewer + 0.02 for fewer, more in pairwise(up))
    assert up[-1] < up[0] - 0.2


def test_popularity_follows_zipf() -> None:
    rates = zipf_rates(3, 1.0, DAY_S)
    assert rates == pytest.approx((6 / 11, 3 / 11, 2 / 11))
    assert zipf_rates(4, 0.0, DAY_S) == pytest.approx((0.25,) * 4)
    (member_,) = with_load([member()], zipf_rates(1, 1.0, 2000.0), Mix())
    setting = Setting(Budget(1), seeds=3)
    (result,) = compare([Case(Kind.ALWAYS_ON, (member_,))], setting)
    assert result.figures["requests"].median == pytest.approx(2000, rel=0.05)


def test_figures_of_all_services_are_those_of_their_requests() -> None:
    members = zipf(4, 3000.0)
    setting = Setting(Budget(2), 3600.0, seeds=1)
    (result,) = compare([Case(Kind.FLEETKEEPER, members)], setting)
    _, tallies = play(Case(Kind.FLEETKEEPER, members), setting, 1)
    waits_s = [wait_s for tally in tallies for wait_s in tally.waits_s]
    assert result.figures["wait_p95_s"].median == quantiles(waits_s, (0.95,))[0]
    longest = max(tally.longest_turn_s for tally in tallies)
    assert result.figures["longest_without_turn_s"].median == longest
    requests = [result.services[name]["requests"].median for name in result.services]
    assert requests == [tally.requests for tally in tallies]
