"""What a tick decided is carried out beside it, and nobody waits for a dead pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.plan.control.values import Admission, Limits, PodOrder, PutOutcome
from fleetkeeper.plan.model import Notice
from fleetkeeper.runtime.control_metrics import ControlMetrics
from fleetkeeper.runtime.control_outbox import DOUBTED_AT_ONCE, Outbox
from fleetkeeper.runtime.queue import Key

CHAT = Key("team-a", "chat")


def order(pod: str, generation: int = 1) -> PodOrder:
    """Limits for a pod."""
    return PodOrder(pod, f"uid-{pod}", "127.0.0.1", Limits(32, 1024), Admission(), 120, generation)


class Doubles:
    """Engines and API server at the network's edge; `gate` holds up what goes to dead pods."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.rounds: list[list[PodOrder]] = []
        self.outcomes: list[PutOutcome] = []
        self.notices: list[Notice] = []
        self.told = asyncio.Event()
        self.breaks = False
        self.registry = CollectorRegistry()
        self.outbox = Outbox(self, self.replace, self.post, ControlMetrics(self.registry))

    async def put_limits(self, orders: Sequence[PodOrder]) -> Sequence[PutOutcome]:
        """The engines."""
        if self.breaks:
            raise ValueError("a defect")
        self.rounds.append(list(orders))
        if any(order.pod.startswith("dead") for order in orders):
            await self.gate.wait()
        return [PutOutcome(order.pod, order.generation, True) for order in orders]

    async def replace(self, key: Key, pod: str, uid: str, why: str) -> None:
        """Never asked here."""
        raise AssertionError((key, pod, uid, why))

    async def post(self, key: Key, notice: Notice) -> None:
        """An API server that answers when it is let."""
        del key
        await self.gate.wait()
        self.notices.append(notice)
        self.told.set()

    def tell(self, outcome: PutOutcome) -> None:
        """What the loop gets."""
        self.outcomes.append(outcome)
        self.told.set()


@asynccontextmanager
async def working(doubles: Doubles) -> AsyncIterator[None]:
    """The outbox's workers."""
    task = asyncio.create_task(doubles.outbox.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_thousand_dead_pods_and_a_slow_api_server_delay_no_lease() -> None:
    """Pods that failed last time wait in a lane of their own, and events in another."""
    doubles = Doubles()
    async with working(doubles):
        for number in range(1000):
            doubles.outbox.send(order(f"dead-{number}"), doubles.tell, doubted=True)
            doubles.outbox.post(CHAT, Notice("Warning", "PrometheusLost", str(number)))
        await asyncio.sleep(0)
        doubles.outbox.send(order("well"), doubles.tell, doubted=False)
        async with asyncio.timeout(10):
            await doubles.told.wait()
        assert [outcome.pod for outcome in doubles.outcomes] == ["well"]
        assert max(map(len, doubles.rounds)) == DOUBTED_AT_ONCE
        assert doubles.notices == []


async def test_a_newer_order_takes_the_place_of_one_not_sent() -> None:
    """A pod gets what was decided last, and each order at most once, whichever its lane."""
    doubles = Doubles()
    doubles.outbox.send(order("a", 1), doubles.tell, doubted=False)
    doubles.outbox.send(order("b", 1), doubles.tell, doubted=True)
    doubles.outbox.send(order("a", 2), doubles.tell, doubted=True)
    doubles.outbox.send(order("b", 2), doubles.tell, doubted=False)
    await doubles.outbox.drain()
    sent = [(order.pod, order.generation) for some in doubles.rounds for order in some]
    assert sorted(sent) == [("a", 2), ("b", 2)]


async def test_a_defect_is_counted_and_the_next_round_is_sent() -> None:
    """The worker outlives it."""
    doubles = Doubles()
    doubles.breaks = True
    doubles.outbox.send(order("a"), doubles.tell, doubted=False)
    await doubles.outbox.drain()
    assert "fleetkeeper_decision_failures_total 1.0" in generate_latest(doubles.registry).decode()
    doubles.breaks = False
    doubles.outbox.send(order("a", 2), doubles.tell, doubted=False)
    await doubles.outbox.drain()
    assert [outcome.generation for outcome in doubles.outcomes] == [2]


async def test_a_lost_lease_ends_the_workers() -> None:
    """What is no defect goes up: the process must end."""
    doubles = Doubles()

    async def lose(key: Key, notice: Notice) -> None:
        del key, notice
        raise LeaseLost("another leads")

    outbox = Outbox(doubles, doubles.replace, lose, ControlMetrics(CollectorRegistry()))
    outbox.post(CHAT, Notice("Normal", "Any", "text"))
    with pytest.raises(ExceptionGroup) as caught:
        await outbox.run()
    assert caught.value.subgroup(LeaseLost) is not None
