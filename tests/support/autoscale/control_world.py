"""Simulated engines behind fake pods on loopback addresses, and a real Prometheus that scrapes them.

kwok gives a pod an address of its node's podCIDR. This node's lies in 127.0.0.0/8, so a fake pod's
control port is a socket of ours: the operator's own calls (limits, direct reads) and Prometheus'
scrapes reach a simulated engine. These pods get no other address; `prove_loopback` asserts it before
an operator starts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import jwt
from aiohttp import web

from fleetkeeper.adapters.engine import CONTROL_PORT
from fleetkeeper.adapters.keys import ControlKeys, new_control_keys
from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper.simulate.requests import Request
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_steps.costs import StepCosts
from tests.support.autoscale.engine_metrics import metrics_text
from tests.support.autoscale.hostile_engine import Hostility, hostile_answer
from tests.support.autoscale.loopback_node import LABEL, loopback_node, prove_loopback
from tests.support.operators.operator_process import PATIENCE_S, OperatorProcess
from tests.support.operators.operator_world import World
from tests.support.services.prometheus_proxy import PrometheusProxy

EDGES: Final = Edges(0.5, 0.05)
SMALL: Final = EngineSpec(StepCosts(0.010, 0.010, 2.0e-5, 5.0e-6, 0.0), max_sequences=8)
"""8 sequences at a time, 10 ms a step: with 100 tokens a request, 8 requests a second at most."""
TOKENS: Final = 100
PASSWORD: Final = "canary-of-prometheus"
"""Part of the operator's Prometheus URL; it must appear nowhere else."""
ADDRESSES: Final = 32
SHORT_TICKS: Final = {
    "runtime.autoscaler.loop.TICK_S": 1.0,
    "runtime.autoscaler.setup.DEADLINE_S": 0.8,
}
SLICE_S: Final = 0.2


@dataclass(frozen=True)
class ReceivedLimits:
    """A limits request that an engine accepted."""

    pod: str
    epoch: int
    generation: int


class LoopbackEngines(PrometheusProxy):
    """The engines of all pods on the loopback node, behind a Prometheus and its proxy."""

    def __init__(self, world: World) -> None:
        super().__init__(world.directory)
        self.world = world
        network = f"{80 + secrets.randbelow(120)}.{secrets.randbelow(250)}"
        self.prefix = f"127.{network}."
        self.node = f"loopback-{world.namespace}"
        self.keys: ControlKeys = new_control_keys()
        self.rate_per_s: dict[str, float] = {}
        self.received: list[ReceivedLimits] = []
        self.hides_targets = False
        self.hostile: dict[str, Hostility] = {}
        """How the pods of a hostile service answer reads of their metrics."""
        self.hostile_reads: Counter[str] = Counter()
        self.direct_reads = 0
        self.demand_grants: set[str] = set()
        """Services whose engines demand grants. An engine of an older image never does."""
        self.slandered: set[str] = set()
        """Pods for which Prometheus gets a sample that says they hang."""
        self.url = ""
        self._engines: dict[str, Engine] = {}
        self._last_request: dict[str, float] = {}
        self._played = time.time()
        """The time up to which requests arrived: a pause of this process is no idle time."""
        self._random = Random(1)
        self._runners: list[web.AppRunner] = []

    # -- what a test asks -------------------------------------------------------------------------

    def operator(
        self, name: str = "a", *, waits: Mapping[str, float] | None = None
    ) -> OperatorProcess:
        """Return an operator process for this world, not started yet, with five times shorter ticks."""
        shorter = {**SHORT_TICKS, **(waits or {})}
        return self.world.operator(name, env=self._settings(), waits=shorter)

    def _settings(self) -> dict[str, str]:
        directory = self.world.directory
        for name, text in self.keys.files().items():
            self._write(name, text)
        return {
            "FLEETKEEPER_CONTROL_ENABLED": "true",
            "FLEETKEEPER_DIRECT_READS": "true",
            "FLEETKEEPER_PROMETHEUS_URL": f"{self.url}/prometheus".replace(
                "://", f"://reader:{PASSWORD}@"
            ),
            "FLEETKEEPER_CONTROL_KEY_FILE": str(directory / "key.pem"),
            "FLEETKEEPER_CONTROL_JWKS_FILE": str(directory / "jwks.json"),
        }

    @property
    def placement(self) -> dict[str, Any]:
        """Return the spec's placement that keeps pods on the loopback node."""
        return {"nodeSelector": {LABEL: self.node}}

    def pods(self, service: str) -> list[dict[str, Any]]:
        """Return a service's pods that have an address."""
        return [
            live
            for (kind, _), live in self.world.objects.items()
            if kind == "Pod"
            # The pod that proved the addresses may still be there. It has no labels.
            and live["metadata"].get("labels", {}).get(LABEL_SERVICE) == service
            and "deletionTimestamp" not in live["metadata"]
            and live["status"].get("podIP")
        ]

    def hang(self, pod: dict[str, Any]) -> None:
        """Stop all steps of a pod's engine."""
        self._engine(pod).hangs = True

    async def grow(self, service: str, pods: int) -> None:
        """Wait for this number of ready pods and report them as ready for ten minutes.

        The control loop does not judge a pod's first minute, and a test need not wait for it.
        """
        done: set[str] = set()

        def missing() -> list[str]:
            ready = [pod["metadata"]["name"] for pod in self.pods(service) if _is_ready(pod)]
            return [name for name in ready if name not in done]

        while len(done) < pods:
            await self.world.until(f"{pods} pods of {service}", missing)
            for name in missing():
                await self._say_long_ready(name)
                done.add(name)

    async def _say_long_ready(self, pod: str) -> None:
        long_ago = datetime.fromtimestamp(time.time() - 600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": long_ago}
        await self.world.client.request(
            "PATCH",
            f"{POD.path(self.world.namespace, pod)}/status",
            body={"status": {"conditions": [ready]}},
            content_type="application/strategic-merge-patch+json",
            timeout_s=30,
        )

    async def source_state(self, operator: OperatorProcess, service: str) -> float | None:
        """Return the operator's gauge of the breaker `source`."""
        labels = ('breaker="source"', f'inference_service="{service}"')
        return await operator.metric("fleetkeeper_breaker_state", *labels)

    async def until_source(
        self, operator: OperatorProcess, service: str, state: float, timeout_s: float = PATIENCE_S
    ) -> float:
        """Wait until the gauge has this value; return the seconds that it took."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while await self.source_state(operator, service) != state:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)
        return time.monotonic() - began

    # -- inside -----------------------------------------------------------------------------------

    async def start(self, plane: ControlPlane) -> None:
        """Create the node and start the sockets and Prometheus."""
        plane.kubectl(
            "create",
            "--validate=false",
            "-f",
            "-",
            input=json.dumps(
                loopback_node(self.node, f"{self.prefix}0/27", network=self.node, gpus=64)
            ),
        )
        await asyncio.to_thread(prove_loopback, plane, self.world.namespace, self.node, self.prefix)
        engines = web.Application()
        engines.router.add_get("/metrics", self._metrics)
        engines.router.add_put("/v1/limits", self._limits)
        await self._serve(engines, [f"{self.prefix}{i}" for i in range(ADDRESSES)], CONTROL_PORT)
        around = web.Application()
        around.router.add_get("/targets", self._targets)
        around.router.add_route("*", "/prometheus/{path:.*}", self._proxy)
        port, own = free_ports(2)
        await self._serve(around, ["127.0.0.1"], port)
        self.url = f"http://127.0.0.1:{port}"
        self.configure(self.url, own)
        await self.start_prometheus()

    async def stop(self) -> None:
        """Stop everything that was started."""
        if self.prometheus is not None and self.prometheus.returncode is None:
            self.signal(signal.SIGCONT)
            self.prometheus.kill()
            await self.prometheus.wait()
        for runner in self._runners:
            await runner.cleanup()

    async def play(self) -> None:
        """Let requests arrive and engines work in real time, until cancelled.

        Where there is no engine nobody asks, and a pause of the test's own process is no burst.
        """
        last, owed = time.time(), dict[str, float]()
        while True:
            await asyncio.sleep(SLICE_S)
            now = time.time()
            for service, rate in self.rate_per_s.items():
                engines = [self._engine(pod) for pod in self.pods(service)]
                if not engines:
                    continue
                for engine in engines:
                    engine.advance(now)
                owed[service] = owed.get(service, 0.0) + rate * min(now - last, 1.0)
                while owed[service] >= 1.0:
                    owed[service] -= 1.0
                    engine = min(engines, key=lambda e: e.load)
                    engine.arrive(Request(now, 1, TOKENS, TOKENS), self._random.random())
                    self._last_request[engine.name] = now
            last = self._played = now

    def _write(self, name: str, text: str) -> Path:
        file = self.world.directory / name
        file.write_text(text)
        return file

    async def _serve(self, app: web.Application, addresses: Sequence[str], port: int) -> None:
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        self._runners.append(runner)
        await runner.setup()
        for address in addresses:
            await web.TCPSite(runner, address, port).start()

    def _engine(self, pod: dict[str, Any]) -> Engine:
        uid = pod["metadata"]["uid"]
        if uid not in self._engines:
            self._engines[uid] = Engine(SMALL, pod["metadata"]["name"], time.time())
            self._last_request[pod["metadata"]["name"]] = self._played
        return self._engines[uid]

    def _pod_at(self, request: web.Request) -> dict[str, Any]:
        """Return the pod whose address was called."""
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        for (kind, _), live in self.world.objects.items():
            if kind == "Pod" and live["status"].get("podIP") == address:
                return live
        raise web.HTTPServiceUnavailable

    def _honest_pods(self) -> list[dict[str, Any]]:
        return [
            pod for name in self.rate_per_s if name not in self.hostile for pod in self.pods(name)
        ]

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        pod = self._pod_at(request)
        engine = self._engine(pod)
        sample = engine.sample(time.time())
        idle_s = self._played - self._last_request[engine.name]
        sample = replace(sample, gauges=sample.gauges._replace(idle_s=idle_s))
        owner = pod["metadata"]["labels"][LABEL_SERVICE]
        if owner in self.demand_grants:
            sample = replace(sample, gauges=sample.gauges._replace(grants_demanded=1.0))
        if owner in self.hostile:
            self.hostile_reads[owner] += 1
            genuine = metrics_text(sample, EDGES)
            victims = [live["metadata"]["name"] for live in self._honest_pods()]
            return await hostile_answer(request, self.hostile[owner], genuine, victims)
        if not request.headers.get("User-Agent", "").startswith("Prometheus"):
            self.direct_reads += 1
        elif engine.name in self.slandered:
            sample = replace(sample, gauges=sample.gauges._replace(hung=1.0))
        return web.Response(text=metrics_text(sample, EDGES))

    async def _limits(self, request: web.Request) -> web.Response:
        """Accept limits like the supervisor: only those that the operator signed for this pod."""
        pod = self._pod_at(request)
        public = jwt.PyJWKSet.from_json(self.keys.jwks).keys[0]
        claims = jwt.decode(
            request.headers["Authorization"].removeprefix("Bearer "),
            public.key,
            algorithms=["EdDSA"],
            audience=pod["metadata"]["uid"],
            issuer="fleetkeeper",
        )
        limits = await request.json()
        engine = self._engine(pod)
        self.received.append(ReceivedLimits(engine.name, claims["epoch"], limits["generation"]))
        engine.limit_sequences, engine.limit_tokens = limits["sequences"], limits["tokens"]
        engine.generation = float(limits["generation"])
        return web.json_response({"generation": limits["generation"]})

    async def _targets(self, _: web.Request) -> web.Response:
        """Return the targets: every pod with an address, labeled like the chart's scrape rules."""
        groups = [
            {
                "targets": [f"{pod['status']['podIP']}:{CONTROL_PORT}"],
                "labels": {
                    "namespace": self.world.namespace,
                    "inference_service": service,
                    "pod": pod["metadata"]["name"],
                },
            }
            for service in self.rate_per_s
            for pod in self.pods(service)
        ]
        return web.json_response([] if self.hides_targets else groups)


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(row["type"] == "Ready" and row["status"] == "True" for row in conditions)


@asynccontextmanager
async def loopback_engines(plane: ControlPlane, world: World) -> AsyncIterator[LoopbackEngines]:
    """Yield engines and Prometheus for the services of a world; remove them and the node at the end."""
    engines = LoopbackEngines(world)
    playing = asyncio.create_task(engines.play())
    try:
        await engines.start(plane)
        yield engines
    finally:
        for process in world.processes:
            process.kill()
        await engines.stop()
        plane.kubectl("delete", "node", engines.node, "--ignore-not-found", "--wait=false")
        playing.cancel()
        # Raises what ended it earlier: without load, a test would only wait in vain.
        with suppress(asyncio.CancelledError):
            await playing
