"""Modelled engines behind fake pods, on loopback addresses, and a real Prometheus that scrapes them.

kwok gives a pod an address of its node's podCIDR. This node's lies in 127.0.0.0/8, so a fake pod's
control port is a socket of ours: the operator's own calls (limits, direct reads) and Prometheus'
scrapes reach a modelled engine. No other address is ever given to these pods; `prove_loopback` says so
before an operator starts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import jwt
from aiohttp import web

from fleetkeeper.adapters.engine import CONTROL_PORT
from fleetkeeper.adapters.keys import ControlKeys, new_control_keys
from fleetkeeper.adapters.kubernetes.resources import POD
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper.autoscale.capacity.step_time_model import StepTime
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.simulate.engine_model import Engine, EnginePod, Request
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.engine_metrics import metrics_text
from tests.support.hostile_engine import Hostility, hostile_answer
from tests.support.operator_world import PATIENCE_S, OperatorProcess, World

EDGES: Final = Edges(0.5, 0.05)
SMALL: Final = Engine(StepTime(0.010, 0.010, 2.0e-5, 5.0e-6, 0.0), max_sequences=8)
"""8 sequences at a time, 10 ms a step: with 100 tokens a request, 8 requests a second at most."""
TOKENS: Final = 100.0
PASSWORD: Final = "canary-of-prometheus"
"""In the operator's address of Prometheus; it may stand nowhere else."""
ADDRESSES: Final = 32
SLICE_S: Final = 0.2
LABEL: Final = "fleetkeeper.test/network"

PROMETHEUS: Final = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
- job_name: engines
  body_size_limit: 4MB
  http_sd_configs: [{url: "%s/targets", refresh_interval: 1s}]
"""


@dataclass(frozen=True)
class TakenOrder:
    """An order that an engine took."""

    pod: str
    epoch: int
    generation: int


class LoopbackEngines:
    """The engines of all pods on the loopback node, a Prometheus, and a proxy before it."""

    def __init__(self, world: World) -> None:
        self.world = world
        network = f"{80 + secrets.randbelow(120)}.{secrets.randbelow(250)}"
        self.prefix = f"127.{network}."
        self.node = f"loopback-{world.namespace}"
        self.keys: ControlKeys = new_control_keys()
        self.rate_per_s: dict[str, float] = {}
        self.orders: list[TakenOrder] = []
        self.fault = ""
        self.hides_targets = False
        self.hostile: dict[str, Hostility] = {}
        """How the pods of a service answer reads of their metrics, where they are hostile."""
        self.hostile_reads: Counter[str] = Counter()
        self.direct_reads = 0
        self.authorizations: set[str] = set()
        self.slandered: set[str] = set()
        """Pods of which Prometheus is told that they hang."""
        self.url = ""
        self._engines: dict[str, EnginePod] = {}
        self._random = Random(1)
        self._runners: list[web.AppRunner] = []
        self.prometheus: asyncio.subprocess.Process | None = None
        self._prometheus_url = ""

    # -- what a test asks -------------------------------------------------------------------------

    def settings(self) -> dict[str, str]:
        """The operator's settings for this world."""
        directory = self.world.directory
        for name, text in self.keys.files().items():
            self._write(name, text)
        return {
            "FLEETKEEPER_CONTROL_ENABLED": "true",
            "FLEETKEEPER_DIRECT_READS": "true",
            "FLEETKEEPER_TICK_S": "1",
            "FLEETKEEPER_LEADER__DURATION_S": "10",
            "FLEETKEEPER_LEADER__RENEW_DEADLINE_S": "5",
            "FLEETKEEPER_PROMETHEUS_URL": f"{self.url}/prometheus".replace(
                "://", f"://reader:{PASSWORD}@"
            ),
            "FLEETKEEPER_CONTROL_KEY_FILE": str(directory / "key.pem"),
            "FLEETKEEPER_CONTROL_JWKS_FILE": str(directory / "jwks.json"),
        }

    @property
    def placement(self) -> dict[str, Any]:
        """The spec's placement that keeps pods on the loopback node."""
        return {"nodeSelector": {LABEL: self.node}}

    def pods(self, service: str) -> list[dict[str, Any]]:
        """A service's pods that have an address."""
        return [
            live
            for (kind, _), live in self.world.objects.items()
            if kind == "Pod"
            and live["metadata"]["labels"].get(LABEL_SERVICE) == service
            and "deletionTimestamp" not in live["metadata"]
            and live["status"].get("podIP")
        ]

    def hang(self, pod: dict[str, Any]) -> None:
        """Lets a pod's engine make no step any more."""
        self._engine(pod).hangs = True

    def signal(self, number: int) -> None:
        """Sends Prometheus a signal."""
        assert self.prometheus is not None
        self.prometheus.send_signal(number)

    async def start_prometheus(self) -> None:
        """Starts it, with what it stored before if it ran already."""
        self.prometheus = await asyncio.create_subprocess_exec(
            str(program_path("prometheus")),
            f"--config.file={self.world.directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self.world.directory / 'prometheus'}",
            f"--web.listen-address={self._prometheus_url.removeprefix('http://')}",
            "--log.level=error",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def stop_prometheus(self) -> None:
        """Ends it: nothing listens at its address any more."""
        assert self.prometheus is not None
        self.prometheus.terminate()
        await self.prometheus.wait()

    async def grow(self, service: str, pods: int) -> None:
        """Waits for so many ready pods and says that they have been ready for ten minutes.

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
        """The operator's gauge of the breaker `source`."""
        wanted = (
            "fleetkeeper_breaker_state{",
            'breaker="source"',
            f'inference_service="{service}"',
        )
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{operator.port}/metrics") as answer,
            ):
                lines = (await answer.text()).splitlines()
        except aiohttp.ClientError:
            return None
        rows = [line for line in lines if all(part in line for part in wanted)]
        return float(rows[0].rpartition(" ")[2]) if rows else None

    async def until_source(
        self, operator: OperatorProcess, service: str, state: float, timeout_s: float = PATIENCE_S
    ) -> float:
        """Waits until the gauge has this value; seconds that it took."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while await self.source_state(operator, service) != state:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.1)
        return time.monotonic() - began

    # -- inside -----------------------------------------------------------------------------------

    async def start(self, plane: ControlPlane) -> None:
        """The node, the sockets, Prometheus."""
        plane.kubectl("create", "--validate=false", "-f", "-", input=json.dumps(self._node()))
        await asyncio.to_thread(self.prove_loopback, plane)
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
        self._prometheus_url = f"http://127.0.0.1:{own}"
        self._write("prometheus.yaml", PROMETHEUS % self.url)
        await self.start_prometheus()

    async def stop(self) -> None:
        """Ends what was started."""
        if self.prometheus is not None and self.prometheus.returncode is None:
            self.signal(signal.SIGCONT)
            self.prometheus.kill()
            await self.prometheus.wait()
        for runner in self._runners:
            await runner.cleanup()

    def prove_loopback(self, plane: ControlPlane) -> None:
        """A pod of the node has an address of ours: none of these pods is anywhere else."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "probe", "namespace": self.world.namespace},
            "spec": {
                "nodeSelector": {LABEL: self.node},
                "containers": [{"name": "probe", "image": "example.invalid/probe:1"}],
            },
        }
        plane.kubectl("create", "-f", "-", input=json.dumps(pod))
        space = ("-n", self.world.namespace)
        plane.kubectl(*space, "wait", "--for=condition=Ready", "pod/probe", "--timeout=60s")
        address = plane.kubectl(*space, "get", "pod", "probe", "-o", "jsonpath={.status.podIP}")
        assert address.startswith(self.prefix), address
        plane.kubectl(*space, "delete", "pod", "probe", "--wait=false")

    async def play(self) -> None:
        """Requests arrive and engines work, in real time, for ever.

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
                owed[service] = owed.get(service, 0.0) + rate * min(now - last, 1.0)
                while owed[service] >= 1.0:
                    owed[service] -= 1.0
                    engine = min(engines, key=lambda e: e.running + sum(map(len, e.queues)))
                    engine.arrive(Request(now, 1, TOKENS, TOKENS), self._random.random())
                for engine in engines:
                    engine.advance(last, now - last)
            last = now

    def _node(self) -> dict[str, Any]:
        resources = {"cpu": "128", "memory": "2Ti", "pods": "30", "nvidia.com/gpu": "64"}
        cidr = f"{self.prefix}0/27"
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.node,
                "annotations": {"kwok.x-k8s.io/node": "fake"},
                "labels": {LABEL: self.node, "kubernetes.io/hostname": self.node},
            },
            "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
            "status": {"capacity": resources, "allocatable": resources},
        }

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

    def _engine(self, pod: dict[str, Any]) -> EnginePod:
        uid = pod["metadata"]["uid"]
        if uid not in self._engines:
            self._engines[uid] = EnginePod(SMALL, pod["metadata"]["name"], time.time())
        return self._engines[uid]

    def _pod_at(self, request: web.Request) -> dict[str, Any]:
        """The pod whose address was called."""
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
        owner = pod["metadata"]["labels"][LABEL_SERVICE]
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
        """As the supervisor does: only what the operator's key signed for this very pod."""
        pod = self._pod_at(request)
        public = jwt.PyJWKSet.from_json(self.keys.jwks).keys[0]
        claims = jwt.decode(
            request.headers["Authorization"].removeprefix("Bearer "),
            public.key,
            algorithms=["EdDSA"],
            audience=pod["metadata"]["uid"],
            issuer="fleetkeeper",
        )
        order = await request.json()
        engine = self._engine(pod)
        self.orders.append(TakenOrder(engine.name, claims["epoch"], order["generation"]))
        engine.limit_sequences, engine.limit_tokens = order["sequences"], order["tokens"]
        engine.generation = float(order["generation"])
        return web.json_response({"generation": order["generation"]})

    async def _targets(self, _: web.Request) -> web.Response:
        """What Prometheus scrapes: every pod that has an address, as the shipped scrape rules label it."""
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

    async def _proxy(self, request: web.Request) -> web.Response:
        """Prometheus, or what `fault` says in its place."""
        self.authorizations.add(request.headers.get("Authorization", ""))
        if self.fault:
            return web.Response(text=self.fault, content_type="application/json")
        url = f"{self._prometheus_url}/{request.match_info['path']}"
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method, url, params=request.query, data=await request.read()
                ) as answer,
            ):
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    content_type=answer.content_type,
                )
        except aiohttp.ClientError as problem:
            raise web.HTTPBadGateway(text=str(problem)) from problem


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(row["type"] == "Ready" and row["status"] == "True" for row in conditions)


@asynccontextmanager
async def loopback_engines(plane: ControlPlane, world: World) -> AsyncIterator[LoopbackEngines]:
    """Engines and Prometheus for the services of a world; the node goes with them."""
    engines = LoopbackEngines(world)
    playing = asyncio.create_task(engines.play())
    try:
        await engines.start(plane)
        yield engines
    finally:
        for process in world.processes:
            process.kill()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await engines.stop()
        plane.kubectl("delete", "node", engines.node, "--ignore-not-found", "--wait=false")
