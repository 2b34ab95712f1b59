"""What a tick decided is carried out beside it, and nobody waits for a dead pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.types import Admission, Limits, LimitsRequest, PodView, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.autoscaler.outbox import DOUBTED_AT_ONCE, Outbox
from fleetkeeper.runtime.metrics import OperatorMetrics
from fleetkeeper.runtime.queue import Key
from tests.support.contained import counted, new_defects

CHAT = Key("team-a", "chat")


def request(pod: str, generation: int = 1) -> LimitsRequest:
    """Limits for a pod."""
    return LimitsRequest(
        pod, f"uid-{pod}", "127.0.0.1", Limits(32, 1024), Admission(), 120, generation
    )


class Doubles:
    """Engines and API server at the network's edge; `gate` holds up what goes to dead pods."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.rounds: list[list[LimitsRequest]] = []
        self.outcomes: list[PutOutcome] = []
        self.events: list[Event] = []
        self.asked: list[str] = []
        self.began = asyncio.Event()
        self.told = asyncio.Event()
        self.breaks = False
        self.metrics = OperatorMetrics()
        control = ControlMetrics(self.metrics.registry)
        self.outbox = Outbox(
            self,
            self.replace,
            self.post,
            self.post_fleet,
            metrics=control,
            defects=new_defects(self.metrics),
        )

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """The engines."""
        if self.breaks:
            raise ValueError("a defect")
        self.rounds.append(list(requests))
        if any(request.pod.startswith("dead") for request in requests):
            await self.gate.wait()
        return [PutOutcome(request.pod, request.generation, True) for request in requests]

    async def replace(self, key: Key, pod: PodView, removal: Removal) -> bool:
        """A pod whose metrics port answers when it is let, and confirms nothing."""
        del key, removal
        self.asked.append(pod.name)
        self.began.set()
        await self.gate.wait()
        return False

    async def post(self, key: Key, event: Event) -> None:
        """An API server that answers when it is let."""
        del key
        await self.gate.wait()
        self.events.append(event)
        self.told.set()

    async def post_fleet(self, event: Event) -> None:
        """Never asked here."""
        raise AssertionError(event)

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
            doubles.outbox.send(CHAT, request(f"dead-{number}"), doubles.tell, doubted=True)
            doubles.outbox.post(CHAT, Event("Warning", "PrometheusLost", str(number)))
        await asyncio.sleep(0)
        doubles.outbox.send(CHAT, request("well"), doubles.tell, doubted=False)
        async with asyncio.timeout(10):
            await doubles.told.wait()
        assert [outcome.pod for outcome in doubles.outcomes] == ["well"]
        assert max(map(len, doubles.rounds)) == DOUBTED_AT_ONCE
        assert doubles.events == []


async def test_a_newer_order_takes_the_place_of_one_not_sent() -> None:
    """A pod gets what was decided last, and each order at most once, whichever its lane."""
    doubles = Doubles()
    doubles.outbox.send(CHAT, request("a", 1), doubles.tell, doubted=False)
    doubles.outbox.send(CHAT, request("b", 1), doubles.tell, doubted=True)
    doubles.outbox.send(CHAT, request("a", 2), doubles.tell, doubted=True)
    doubles.outbox.send(CHAT, request("b", 2), doubles.tell, doubted=False)
    await doubles.outbox.drain()
    sent = [(request.pod, request.generation) for some in doubles.rounds for request in some]
    assert sorted(sent) == [("a", 2), ("b", 2)]


async def test_a_defect_is_counted_and_the_next_round_is_sent() -> None:
    """The worker outlives it."""
    doubles = Doubles()
    doubles.breaks = True
    doubles.outbox.send(CHAT, request("a"), doubles.tell, doubted=False)
    await doubles.outbox.drain()
    assert counted(doubles.metrics) == {"send_limits": 1.0}
    doubles.breaks = False
    doubles.outbox.send(CHAT, request("a", 2), doubles.tell, doubted=False)
    await doubles.outbox.drain()
    assert [outcome.generation for outcome in doubles.outcomes] == [2]


async def test_a_pod_that_does_not_answer_delays_no_event() -> None:
    """Removals wait for a pod's answer, in a lane of their own; each pod is asked once."""
    doubles = Doubles()
    told = asyncio.Event()

    async def post(key: Key, event: Event) -> None:
        del key, event
        told.set()

    outbox = Outbox(
        doubles,
        doubles.replace,
        post,
        doubles.post_fleet,
        metrics=ControlMetrics(CollectorRegistry()),
        defects=new_defects(),
    )
    removal = Removal(Cause.HUNG, "why", Event("Warning", "EngineHung", "text"))
    for _ in range(2):
        outbox.replace(CHAT, PodView("chat-0", "uid-0", 1.0), removal)
    task = asyncio.create_task(outbox.run())
    async with asyncio.timeout(10):
        await doubles.began.wait()
        outbox.post(CHAT, Event("Normal", "Any", "text"))
        await told.wait()
    assert doubles.asked == ["chat-0"]
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_lost_lease_ends_the_workers() -> None:
    """What is no defect goes up: the process must end."""
    doubles = Doubles()

    async def lose(key: Key, event: Event) -> None:
        del key, event
        raise LeaseLost("another leads")

    control = ControlMetrics(CollectorRegistry())
    outbox = Outbox(
        doubles, doubles.replace, lose, doubles.post_fleet, metrics=control, defects=new_defects()
    )
    outbox.post(CHAT, Event("Normal", "Any", "text"))
    with pytest.raises(ExceptionGroup) as caught:
        await outbox.run()
    assert caught.value.subgroup(LeaseLost) is not None
