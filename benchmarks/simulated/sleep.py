"""Let ten services sleep and wake on the local node: does a request fail, and how long does a wake take?

    .venv/bin/python benchmarks/simulated/sleep.py [--services 10] [--cycles 50]

It needs root, and no other node on the machine. Operator, Prometheus, gateway, routers and engine pods are
real; only vLLM is simulated. Each service gets single requests with exponential pauses, most of them longer
than its idle time, until all services together woke `--cycles` times. Then all of them are asked at once.
Clients send each request once, with a key of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper_local.common.paths import data_dir  # noqa: E402
from fleetkeeper_local.common.report import say  # noqa: E402
from fleetkeeper_local.demo.cluster import Cluster  # noqa: E402
from fleetkeeper_local.demo.front_door import FrontDoor  # noqa: E402
from fleetkeeper_local.demo.installation import GATEWAY, NAMESPACE, ensure_namespace  # noqa: E402
from fleetkeeper_local.demo.record import seconds_of  # noqa: E402
from fleetkeeper_local.demo.scenario import EngineKind  # noqa: E402
from fleetkeeper_local.demo.stage import LocalStage  # noqa: E402
from fleetkeeper_local.node.flags import read_settings  # noqa: E402
from fleetkeeper_local.node.node import Node  # noqa: E402

TITLE = "# Simulated engines, measured\n"
HEADING = "Services that sleep"
TENANT = "fleetkeeper-sleep"
IDLE_S, AWAKE_S = 30, 10
PAUSE_S = 75.0
"""Mean pause between two requests of one service: two of three are longer than the idle time."""
MAX_S = 3600.0
TIMEOUT_S = 120.0
SEED = 37


def desired_service(name: str) -> dict[str, Any]:
    """Return an InferenceService that sleeps."""
    return {
        "apiVersion": "fleetkeeper.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "pvc://models/none"},
            "engine": {"profile": "simulated", "maxModelLength": 8192},
            "access": "Gateway",
            "scaling": {"sleep": {"afterIdleSeconds": IDLE_S, "minAwakeSeconds": AWAKE_S}},
            "routing": {"replicas": 1},
            "rollout": {"drainSeconds": 30},
        },
    }


@dataclass
class Answered:
    """A request and its answer; times are seconds since the epoch."""

    service: str
    sent: float
    ended: float
    status: int
    code: str


@dataclass
class Replicas:
    """The changes of the engine Deployments' replicas, as a watch shows them."""

    changes: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    async def watch(self, cluster: Cluster) -> None:
        """Record the changes until cancelled. kubectl ends a watch now and then."""
        columns = "custom-columns=N:.metadata.name,R:.spec.replicas"
        arguments = ("-n", TENANT, "get", "deployments", "-w", "--no-headers", "-o", columns)
        while True:
            process = await asyncio.create_subprocess_exec(
                *cluster.argv(*arguments), stdout=asyncio.subprocess.PIPE
            )
            try:
                assert process.stdout is not None
                async for line in process.stdout:
                    name, number = line.decode().split()
                    seen = self.changes.setdefault(name, [])
                    if not seen or seen[-1][1] != int(number):
                        seen.append((time.time(), int(number)))
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.wait()

    def present(self, name: str) -> int:
        """Return the replicas that a service has now; -1 before its Deployment exists."""
        seen = self.changes.get(name)
        return seen[-1][1] if seen else -1

    def wakes(self, name: str) -> list[float]:
        """Return when the service got its first replica after a sleep."""
        seen = self.changes.get(name, [])
        return [later for (_, old), (later, new) in itertools.pairwise(seen) if not old and new]

    def sleeps(self, name: str) -> int:
        """Return how often the service released its last replica."""
        seen = self.changes.get(name, [])
        return sum(bool(old) and not new for (_, old), (_, new) in itertools.pairwise(seen))


class Clients:
    """The clients of all services."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url = session, url
        self._headers = {"Authorization": f"Bearer {key}"}
        self.answers: list[Answered] = []

    async def ask(self, service: str) -> None:
        """Send one request, and record its answer."""
        body = {"model": service, "prompt": "The queue", "max_tokens": 8}
        sent, status, code = time.time(), 0, ""
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, headers=self._headers
            ) as answer:
                status = answer.status
                text = await answer.text()
                code = "" if status == 200 else json.loads(text)["error"]["code"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            code = type(error).__name__
        self.answers.append(Answered(service, sent, time.time(), status, code))

    async def poisson(self, service: str, source: random.Random, until: asyncio.Event) -> None:
        """Ask again and again until the event is set; requests of one service may overlap."""
        async with asyncio.TaskGroup() as open_requests:
            while not until.is_set():
                pause_s = source.expovariate(1 / PAUSE_S)
                try:
                    await asyncio.wait_for(until.wait(), pause_s)
                except TimeoutError:
                    open_requests.create_task(self.ask(service))


class Starts:
    """When each engine pod became ready, by service."""

    def __init__(self) -> None:
        self.ready: dict[str, tuple[str, float, float]] = {}
        """(service, creation, readiness) by the pod's UID."""

    async def watch(self, cluster: Cluster) -> None:
        """Read the pods each second until cancelled: a pod is deleted half a minute after its last request."""
        selector = "fleetkeeper.io/component=engine"
        while True:
            for pod in await asyncio.to_thread(cluster.pods, TENANT, selector):
                for row in pod["status"].get("conditions") or ():
                    if (row["type"], row["status"]) == ("Ready", "True"):
                        metadata = pod["metadata"]
                        self.ready[metadata["uid"]] = (
                            metadata["labels"]["fleetkeeper.io/service"],
                            seconds_of(metadata["creationTimestamp"]),
                            seconds_of(row["lastTransitionTime"]),
                        )
            await asyncio.sleep(1.0)


async def until_asleep(replicas: Replicas, names: list[str], timeout_s: float = 300.0) -> None:
    """Wait until no service has a replica.

    Raises:
        TimeoutError: some still have; the text names them.
    """
    end = time.monotonic() + timeout_s
    while awake := [name for name in names if replicas.present(name) != 0]:
        if time.monotonic() > end:
            raise TimeoutError(f"still awake after {timeout_s:.0f} s: {', '.join(awake)}")
        await asyncio.sleep(1.0)


async def play(stage: LocalStage, url: str, key: str, names: list[str], cycles: int) -> list[str]:
    """Send the requests, and return the parts of the report."""
    replicas, starts = Replicas(), Starts()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        watching = [
            asyncio.create_task(replicas.watch(stage.cluster)),
            asyncio.create_task(starts.watch(stage.cluster)),
        ]
        try:
            say("waiting until all services sleep for the first time")
            await until_asleep(replicas, names)
            clients = Clients(session, url, key)
            enough, began = asyncio.Event(), time.monotonic()
            sending = [
                asyncio.create_task(clients.poisson(name, random.Random(f"{SEED} {name}"), enough))
                for name in names
            ]
            while sum(len(replicas.wakes(name)) for name in names) < cycles:
                if time.monotonic() - began > MAX_S:
                    break
                await asyncio.sleep(1.0)
            enough.set()
            await asyncio.gather(*sending)
            cycled = len(clients.answers)
            say("all services sleep again; then each is asked at once")
            await until_asleep(replicas, names)
            await asyncio.gather(*(clients.ask(name) for name in names))
            await asyncio.sleep(2.0)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
    return report(clients.answers, cycled, replicas, starts, names)


def report(
    answers: list[Answered], cycled: int, replicas: Replicas, starts: Starts, names: list[str]
) -> list[str]:
    """Return a table, and the codes of failed requests."""
    rows = []
    for title, part in (("Poisson", answers[:cycled]), ("all at once", answers[cycled:])):
        orders, after, held = [], [], []
        for answer in part:
            wakes = [
                at for at in replicas.wakes(answer.service) if answer.sent <= at <= answer.ended
            ]
            if not wakes:
                continue
            orders.append(wakes[0] - answer.sent)
            held.append(answer.ended - answer.sent)
            ready = [
                at
                for service, created, at in starts.ready.values()
                if service == answer.service
                and answer.sent - 1 <= created
                and at <= answer.ended + 1
            ]
            if ready:
                after.append(answer.ended - ready[0])
        failed = [answer for answer in part if answer.status != 200]
        rows.append([title, str(len(part)), str(len(failed)), *map(_spread, (orders, held, after))])
    sleeps = sum(replicas.sleeps(name) for name in names)
    woken = sum(len(replicas.wakes(name)) for name in names)
    took = [ready - created for _, created, ready in starts.ready.values()]
    codes = sorted({f"{a.status} {a.code}" for a in answers if a.status != 200})
    return [
        (
            f"{sleeps} sleeps and {woken} wakes of {len(names)} services. A pod starts in {_spread(took)} "
            f"(whole seconds). Failed requests: {', '.join(codes) or 'none'}."
        ),
        markdown_table(
            ["requests", "sent", "failed", "order after", "answer after", "answer after ready"],
            rows,
        ),
    ]


def _spread(values: list[float]) -> str:
    """Return the median and the 95th percentile of seconds."""
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{median(ordered):.1f} s ({ordered[math.ceil(0.95 * len(ordered)) - 1]:.1f})"


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--services", type=int, default=10)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    args = parser.parse_args()
    stage = LocalStage(Node(read_settings(data_dir())))
    stage.install(EngineKind.SIMULATED)
    stage.cluster.kubectl("delete", "namespace", TENANT, "--ignore-not-found")
    ensure_namespace(stage.cluster, TENANT)
    names = [f"rare-{number}" for number in range(args.services)]
    stage.cluster.apply(*(desired_service(name) for name in names), namespace=TENANT)
    with stage.reach(NAMESPACE, GATEWAY) as url:
        key = FrontDoor(stage.cluster, url, NAMESPACE).create_key("sleep", TENANT)
        found = asyncio.run(play(stage, url, key, names, args.cycles))
    text = (
        f"{args.services} services on the local node with `afterIdleSeconds: {IDLE_S}`, asked by Poisson arrivals with a mean pause of "
        f"{PAUSE_S:.0f} s, one try each. Median (P95). *Order after*: from the request to the Deployment's first replica, for requests that woke "
        "a service. *Answer after*: from the request to its answer. *Answer after ready*: from the pod's readiness, in whole seconds."
    )
    section = "\n\n".join(["    .venv/bin/python benchmarks/simulated/sleep.py", text, *found, measured_on()])  # fmt: skip
    if args.write:
        write_section(HEADING, section, HERE / "RESULTS.md", TITLE)
    print(section)


if __name__ == "__main__":
    main()
