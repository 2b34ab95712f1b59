"""What a tick decided is carried out beside it, and nobody waits for a dead pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from fleetkeeper.adapters.kubernetes.lease import LeaseLost
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.types import Admission, Limits, LimitsRequest, PodView, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.runtime.autoscaler.dispatcher import FAILURE_KEPT_S, RETRY_BATCH, Dispatcher
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.operators.contained import counted, new_defects

CHAT = Key("team-a", "chat")


def request(pod: str, generation: int = 1) -> LimitsRequest:
    """Limits for a pod."""
    return LimitsRequest(
        pod, f"uid-{pod}", "127.0.0.1", Limits(32, 1024), Admission(), 120, generation
    )


class Doubles:
    """Engines and API server at the network's edge; `gate` holds up what goes to dead pods."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.gate = asyncio.Event()
        self.rounds: list[list[LimitsRequest]] = []
        self.outcomes: list[PutOutcome] = []
        self.events: list[Event] = []
        self.asked: list[str] = []
        self.began = asyncio.Event()
        self.told = asyncio.Event()
        self.breaks = False
        self.confirms = False
        self.failing: set[str] = set()
        self.metrics = OperatorMetrics()
        self.dispatcher = Dispatcher(
            self,
            self.replace,
            self.record,
            metrics=ControlMetrics(self.metrics.registry),
            defects=new_defects(self.metrics),
            now=lambda: self.clock,
        )

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """The engines. Pods named dead fail, each after the gate has opened."""
        if self.breaks:
            raise ValueError("a defect")
        self.rounds.append(list(requests))
        self.began.set()
        if any(request.pod.startswith("dead") for request in requests):
            await self.gate.wait()
        return [
            PutOutcome(
                request.pod,
                request.generation,
                not request.pod.startswith("dead") and request.pod not in self.failing,
            )
            for request in requests
        ]

    async def replace(self, key: Key, pod: PodView, removal: Removal) -> bool:
        """A pod whose metrics port answers when it is let."""
        del key, removal
        self.asked.append(pod.name)
        self.began.set()
        await self.gate.wait()
        return self.confirms

    def record(self, key: Key, event: Event) -> None:
        """The recorder of events."""
        del key
        self.events.append(event)

    def send(self, pod: str, generation: int = 1) -> None:
        """Limits for a pod of `chat`."""
        self.dispatcher.send(CHAT, request(pod, generation), self.tell)

    def tell(self, outcome: PutOutcome) -> None:
        """What the loop gets."""
        self.outcomes.append(outcome)
        if not outcome.pod.startswith("dead"):
            self.told.set()

    async def finish(self) -> None:
        """Everything that is queued."""
        for lane in self.dispatcher.lanes:
            await lane.finish()


@asynccontextmanager
async def working(doubles: Doubles) -> AsyncIterator[None]:
    """The workers."""
    task = asyncio.create_task(doubles.dispatcher.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_thousand_dead_pods_delay_no_lease() -> None:
    """Pods whose last request failed wait in a lane of their own."""
    doubles = Doubles()
    doubles.gate.set()
    for number in range(1000):
        doubles.send(f"dead-{number}")
    await doubles.finish()
    doubles.gate.clear()
    doubles.rounds.clear()
    async with working(doubles):
        for number in range(1000):
            doubles.send(f"dead-{number}", 2)
        await asyncio.sleep(0)
        doubles.send("well")
        async with asyncio.timeout(60):
            await doubles.told.wait()
        assert [outcome.pod for outcome in doubles.outcomes if outcome.succeeded] == ["well"]
        assert ["well"] in [[request.pod for request in some] for some in doubles.rounds]
        assert max(map(len, doubles.rounds)) == RETRY_BATCH


async def test_a_newer_request_takes_the_place_of_one_not_sent_whichever_its_lane() -> None:
    """A pod gets what was decided last, and each request at most once."""
    doubles = Doubles()
    doubles.failing = {"a"}
    for pod in ("a", "b"):
        doubles.send(pod, 1)
    await doubles.finish()
    doubles.send("a", 2)  # waits among the retries
    doubles.dispatcher._failed.clear()
    doubles.send("a", 3)
    doubles.dispatcher._failed["uid-b"] = doubles.clock
    doubles.send("b", 2)
    doubles.send("b", 3)
    doubles.rounds.clear()
    await doubles.finish()
    sent = [(request.pod, request.generation) for some in doubles.rounds for request in some]
    assert sorted(sent) == [("a", 3), ("b", 3)]


async def test_a_pod_that_answers_again_leaves_the_lane_of_retries() -> None:
    """So does one whose failure is long past."""
    doubles = Doubles()
    doubles.failing = {"a", "b"}
    with capture_logs() as lines:
        for _ in range(3):
            doubles.send("a")
            doubles.send("b")
            await doubles.finish()
        assert [line["pod"] for line in lines] == ["a", "b"]
    doubles.failing = {"b"}
    doubles.send("a")
    await doubles.finish()
    assert list(doubles.dispatcher._failed) == ["uid-b"]
    doubles.clock += FAILURE_KEPT_S
    doubles.send("a")
    await doubles.finish()
    assert doubles.dispatcher._failed == {}


async def test_a_defect_is_counted_and_the_next_round_is_sent() -> None:
    """The worker outlives it."""
    doubles = Doubles()
    doubles.breaks = True
    doubles.send("a")
    await doubles.finish()
    assert counted(doubles.metrics) == {"send_limits": 1.0}
    doubles.breaks = False
    doubles.send("a", 2)
    await doubles.finish()
    assert [outcome.generation for outcome in doubles.outcomes] == [2]


async def test_a_pod_that_does_not_answer_a_read_delays_no_limits_request() -> None:
    """Removals have a lane of their own; each pod is asked once, and told of if it confirms."""
    doubles = Doubles()
    doubles.confirms = True
    removal = Removal(Cause.HUNG, "why", Event("Warning", "EngineHung", "text"))
    for _ in range(2):
        doubles.dispatcher.replace(CHAT, PodView("chat-0", "uid-0", 1.0), removal)
    async with working(doubles), asyncio.timeout(60):
        await doubles.began.wait()
        doubles.send("well")
        await doubles.told.wait()
        assert (doubles.asked, doubles.events) == (["chat-0"], [])
        doubles.gate.set()
        await doubles.finish()
        await asyncio.sleep(0)
    assert (doubles.asked, doubles.events) == (["chat-0"], [removal.event])


async def test_a_lost_lease_ends_the_workers() -> None:
    """What is no defect goes up: the process must end."""
    doubles = Doubles()

    async def lose(key: Key, pod: PodView, removal: Removal) -> bool:
        raise LeaseLost("another leads")

    doubles.dispatcher._replace_pod = lose
    removal = Removal(Cause.HUNG, "why", Event("Warning", "EngineHung", "text"))
    doubles.dispatcher.replace(CHAT, PodView("chat-0", "uid-0", 1.0), removal)
    with pytest.raises(ExceptionGroup) as caught:
        await doubles.dispatcher.run()
    assert caught.value.subgroup(LeaseLost) is not None
