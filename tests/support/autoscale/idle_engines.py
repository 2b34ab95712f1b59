"""Idle engines on loopback addresses for fake pods, half of which do not answer.

kwok gives a pod an address of its node's podCIDR. These nodes' lie in 127.0.0.0/8, so the operator's
own reads and limits reach either a socket of this process or nothing at all.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from aiohttp import web

from fleetkeeper.adapters.engine import CONTROL_PORT
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.simulate.engine import Engine, EngineSpec
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_steps.costs import StepCosts
from tests.support.autoscale.engine_metrics import metrics_text
from tests.support.autoscale.loopback_node import LABEL, loopback_node

NETWORK: Final = "127.77"
ADDRESSES_A_NODE: Final = 32
EDGES: Final = Edges(0.5, 0.05)
IDLE: Final = EngineSpec(StepCosts(0.010, 0.010, 2.0e-5, 5.0e-6, 0.0), max_sequences=256)
IDLE_POD: Final = Engine(IDLE, "idle", time.time())
"""Every address answers with the samples of one engine: idle ones are all alike."""
READY_TIMEOUT: Final = "120s"


def add_nodes(plane: ControlPlane, count: int, gpus: int) -> None:
    """Add fake nodes whose pods get loopback addresses, and wait until they are Ready."""
    plane.add_nodes(1, gpus=0)  # starts kwok; no engine fits on this node
    nodes = [
        loopback_node(f"loopback-{number:04d}", _cidr(number), network=NETWORK, gpus=gpus)
        for number in range(count)
    ]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes})
    plane.kubectl("create", "--validate=false", "-f", "-", input=listed)
    plane.kubectl(
        "wait",
        "--for=condition=Ready",
        "node",
        "-l",
        f"{LABEL}={NETWORK}",
        f"--timeout={READY_TIMEOUT}",
    )


def _cidr(node: int) -> str:
    return f"{NETWORK}.{node // 8}.{node % 8 * ADDRESSES_A_NODE}/27"


@contextmanager
def half_answer(nodes: int) -> Iterator[None]:
    """Serve idle engines on every second address of so many nodes."""
    addresses = [
        f"{NETWORK}.{node // 8}.{node % 8 * ADDRESSES_A_NODE + place}"
        for node in range(nodes)
        for place in range(1, ADDRESSES_A_NODE - 1, 2)
    ]
    stop, listening = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(addresses, listening, stop)))
    thread.start()
    try:
        if not listening.wait(30) or not thread.is_alive():
            raise RuntimeError(f"cannot listen on {NETWORK}.0.0/16, port {CONTROL_PORT}")
        yield
    finally:
        stop.set()
        thread.join()


async def _serve(addresses: list[str], listening: threading.Event, stop: threading.Event) -> None:
    app = web.Application()
    app.router.add_get("/metrics", _metrics)
    app.router.add_put("/v1/limits", _limits)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        for address in addresses:
            await web.TCPSite(runner, address, CONTROL_PORT).start()
        listening.set()
        await asyncio.to_thread(stop.wait)
    finally:
        listening.set()
        await runner.cleanup()


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(text=metrics_text(IDLE_POD.sample(time.time()), EDGES))


async def _limits(request: web.Request) -> web.Response:
    order: dict[str, Any] = await request.json()
    return web.json_response({"generation": order["generation"]})
