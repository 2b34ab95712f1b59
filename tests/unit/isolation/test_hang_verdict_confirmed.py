"""A pod is deleted only if that very pod, read directly after the decision, confirms the cause.

The pod's metrics port and the API server are sockets on loopback; all between them is the operator's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from aiohttp import web

from fleetkeeper.adapters.engine import Engines
from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.adapters.kubernetes.writes import KubernetesWriter
from fleetkeeper.autoscale.constants import HANG_S
from fleetkeeper.autoscale.rules.removal import Cause, Removal
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import Counters, Gauges, PodSample
from fleetkeeper.autoscale.types import PodView
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.types import Pod
from fleetkeeper.runtime.autoscaler.pod_replacement import PodReplacer
from fleetkeeper.runtime.autoscaler.sources import read_pod
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.reconciler.live_services import LiveServices
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from tests.support.autoscale.control_cases import Loop, sample
from tests.support.autoscale.engine_metrics import metrics_text
from tests.support.plane.loopback_api import served

CHAT = Key("team-a", "chat")
SERVICE = {"metadata": {"name": "chat", "namespace": "team-a", "uid": "u1", "resourceVersion": "3"}}
EDGES = Edges(0.5, 0.05)
HUNG = Removal(Cause.HUNG, "it hangs", Event("Warning", "EngineHung", "it hangs"))
FRAGMENTED = Removal(Cause.FRAGMENTED, "unused", Event("Normal", "EngineFragmented", "unused"))

Answer = Callable[[], Awaitable[web.StreamResponse]]


def shown(**gauges: float) -> Answer:
    """The pod's metrics with these gauges."""

    async def answer() -> web.StreamResponse:
        found = sample(time.time(), gauges=Gauges(running=5.0, **gauges))
        return web.Response(text=metrics_text(found, EDGES))

    return answer


def text(body: str, status: int = 200) -> Answer:
    """Any other answer."""

    async def answer() -> web.StreamResponse:
        return web.Response(text=body, status=status)

    return answer


async def silence() -> web.StreamResponse:
    """Takes the request and answers nothing in time."""
    await asyncio.sleep(3600)
    return web.Response()


@dataclass
class World:
    """A pod, the API server that keeps it, and what each was asked, in order."""

    answer: Answer
    asked: list[str] = field(default_factory=list)
    direct_reads: bool = True

    def __post_init__(self) -> None:
        self.cache = Cache(now=time.time, changed=lambda _: None)
        self.cache.put_service(SERVICE)
        pod = Pod("chat-1", "uid-1", "chat", "engine", "r1", "t1", 1.0, ready=False)
        self.cache.put(Seen("Pod", "team-a", "chat-1", 41, "chat", pod))

    @asynccontextmanager
    async def replacer(self) -> AsyncIterator[PodReplacer]:
        """The operator's side."""

        async def metrics(_: web.Request) -> web.StreamResponse:
            self.asked.append("read")
            return await self.answer()

        async def api(request: web.Request) -> web.StreamResponse:
            self.asked.append(request.method)
            return web.json_response(SERVICE if request.method == "GET" else {"kind": "Status"})

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engines = Engines(time.time, port=runner.addresses[0][1])
        try:
            async with served(api) as client:
                yield PodReplacer(
                    KubernetesWriter(client, fence=lambda: None),
                    self.cache,
                    OperatorMetrics(),
                    is_unchanged=LiveServices(client, self.cache).is_unchanged,
                    read_pod=partial(read_pod, engines) if self.direct_reads else None,
                )
        finally:
            await engines.close()
            await runner.cleanup()


POD = PodView("chat-1", "uid-1", 1.0, ip="127.0.0.1")


@pytest.mark.parametrize(
    ("removal", "answer"),
    [(HUNG, shown(hung=1.0)), (FRAGMENTED, shown(memory_fragmentation_ratio=0.4))],
    ids=["hung", "fragmented"],
)
async def test_a_pod_that_confirms_the_cause_is_deleted(removal: Removal, answer: Answer) -> None:
    """Asked first, deleted then."""
    world = World(answer)
    async with world.replacer() as replacer:
        assert await replacer.replace(CHAT, POD, removal)
    assert world.asked == ["read", "GET", "DELETE"]


KEPT: dict[str, tuple[Removal, Answer]] = {
    "says 0": (HUNG, shown(hung=0.0)),
    "no verdict": (HUNG, text("fleetkeeper_running 3.0\n")),
    "an error": (HUNG, text("fleetkeeper_hung 1.0\n", 503)),
    "garbage": (HUNG, text("\x00\x01 fleetkeeper_hung{ 1\n")),
    "NaN": (HUNG, text("fleetkeeper_hung NaN\n")),
    "2": (HUNG, text("fleetkeeper_hung 2.0\n")),
    "empty": (HUNG, text("")),
    "no answer": (HUNG, silence),
    "hung, for another cause": (FRAGMENTED, shown(hung=1.0)),
    "less than 30%": (FRAGMENTED, shown(memory_fragmentation_ratio=0.3)),
    "more than all": (FRAGMENTED, shown(memory_fragmentation_ratio=1.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KEPT)
async def test_a_pod_that_does_not_confirm_the_cause_is_kept(case: str) -> None:
    """No answer is no confirmation: the liveness probe decides."""
    removal, answer = KEPT[case]
    world = World(answer)
    async with world.replacer() as replacer:
        assert not await replacer.replace(CHAT, POD, removal)
    assert world.asked == ["read"]
    assert [pod.deleting for pod in world.cache.pods(CHAT)] == [False]


@pytest.mark.parametrize("case", ["refused", "no address", "reads are off"])
async def test_a_pod_that_cannot_be_asked_is_kept(case: str) -> None:
    world = World(shown(hung=1.0), direct_reads=case != "reads are off")
    pod = replace(POD, ip={"refused": "127.255.255.254", "no address": ""}.get(case, POD.ip))
    async with world.replacer() as replacer:
        assert not await replacer.replace(CHAT, pod, HUNG)
    assert world.asked == []


@pytest.mark.parametrize(("says", "asked"), [(0.0, ["read"]), (1.0, ["read", "GET", "DELETE"])])
async def test_what_prometheus_claims_of_a_pod_deletes_nothing(
    says: float, asked: list[str]
) -> None:
    """Its series says 1 for as long as it likes; the pod's own word, after the decision, counts."""
    world = World(shown(hung=says))
    loop = Loop(replicas=2)
    claimed = Gauges(running=5.0, limit_sequences=32.0, hung=1.0)
    async with world.replacer() as replacer:
        for _ in range(round(HANG_S / 5) + 5):
            rows = [sample(loop.now), PodSample("chat-1", loop.now, Counters(steps=41.0), claimed)]
            for name, removal in loop.tick(rows).replace_pods.items():
                assert name == "chat-1"
                await replacer.replace(CHAT, POD, removal)
    assert world.asked == asked
