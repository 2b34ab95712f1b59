"""What refused requests ask for: replicas, only until arrivals do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.status_enums import BreakerState
from fleetkeeper.autoscale.capacity.demand import Demand
from fleetkeeper.autoscale.capacity.estimate import Estimate
from fleetkeeper.autoscale.constants import DEMAND_TICKS
from fleetkeeper.autoscale.rules.batch.values import BatchMemory
from fleetkeeper.autoscale.rules.load_breaker import LoadBreaker, TierBreaker
from fleetkeeper.autoscale.rules.need import need_of
from fleetkeeper.autoscale.signals.samples import Counters
from fleetkeeper.autoscale.state import Breakers, TickState
from tests.support.autoscale.batch_cases import targets
from tests.support.autoscale.control_cases import NOW
from tests.support.autoscale.replica_cases import INPUTS, WAITS

SHEDS = LoadBreaker(batch=TierBreaker(BreakerState.OPEN, NOW - 60, admit=0.1))
BATCH = replace(WAITS, rates=WAITS.rates._replace(arrivals_batch=3.0))
FULL = replace(WAITS, queue_wait_s=0.1, rates=Counters(arrivals_standard=40, wait_count_standard=4))


def state(seen: object, load: LoadBreaker, ticks: int) -> TickState:
    """Return a fleet with a step-time model whose demand is known for so many ticks."""
    estimate = Estimate(targets=targets(2048, 64), demand=Demand(4.0, ticks), capacity=32.0)
    return TickState(INPUTS, seen, seen, estimate, Breakers(load))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "load"),
    [(BATCH, SHEDS), (FULL, LoadBreaker())],
    ids=["batch is shed", "a queue is full"],
)
@pytest.mark.parametrize(("ticks", "lasts"), [(DEMAND_TICKS - 1, True), (DEMAND_TICKS, False)])
def test_refused_requests_order_only_until_the_demand_is_known(
    seen: object, load: LoadBreaker, ticks: int, lasts: bool
) -> None:
    """A known demand includes them: then a batch that is shed needs no replica of its own."""
    need = need_of(state(seen, load, ticks), BatchMemory(), NOW)
    assert need.wait_lasts is lasts
    assert need.is_trusted is not lasts


@pytest.mark.parametrize(
    "seen", [WAITS, replace(BATCH, queue_wait_s=0.1)], ids=["no batch", "no long wait"]
)
def test_a_batch_breaker_alone_orders_nothing(seen: object) -> None:
    assert not need_of(state(seen, SHEDS, 1), BatchMemory(), NOW).wait_lasts
