"""Let ten services sleep and wake on the local node: does a request fail, and how long does a wake take?

    .venv/bin/python benchmarks/simulated/sleep.py [--services 10] [--cycles 50]

It needs root, and no other node on the machine. Operator, Prometheus, gateway, routers and engine pods are
real; only vLLM is simulated. Each service gets single requests with exponential pauses, most of them longer
than its idle time, until all services together woke `--cycles` times. Then all of them are asked at once.
Clients send each request once, with a key of the gateway. Watches show when each step of a start came.
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
from collections.abc import AsyncIterator
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
NONE = "<none>"
STEPS = ("engine address", "router address", "engine ready", "router ready", "endpoint")
"""Steps of a wake. *Endpoint*: the router is in the Service that the gateway sends to."""
LAST = "answer begins"


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
    began: float
    """Time of the head of the answer, which a stream has once a replica took the request."""
    ended: float
    status: int
    code: str


async def watched(
    cluster: Cluster, kind: str, **columns: str
) -> AsyncIterator[tuple[float, dict[str, str]]]:
    """Yield each row of a watch, and when it came, until cancelled. kubectl ends a watch now and then."""
    output = ",".join(f"{name}:{path}" for name, path in columns.items())
    arguments = ("-n", TENANT, "get", kind, "-w", "--no-headers", "-o", f"custom-columns={output}")
    while True:
        process = await asyncio.create_subprocess_exec(
            *cluster.argv(*arguments), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                yield time.time(), dict(zip(columns, line.decode().split(), strict=True))
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


@dataclass
class Replicas:
    """The changes of the engine Deployments' replicas, as a watch shows them."""

    changes: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    async def watch(self, cluster: Cluster) -> None:
        """Record the changes until cancelled."""
        rows = watched(cluster, "deployments", name=".metadata.name", replicas=".spec.replicas")
        async for at, row in rows:
            seen = self.changes.setdefault(row["name"], [])
            if not seen or seen[-1][1] != int(row["replicas"]):
                seen.append((at, int(row["replicas"])))

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
        body = {"model": service, "prompt": "The queue", "max_tokens": 8, "stream": True}
        sent, status, code = time.time(), 0, ""
        began = math.inf
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, headers=self._headers
            ) as answer:
                status, began = answer.status, time.time()
                text = await answer.text()
                code = "" if status == 200 else json.loads(text)["error"]["code"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            code = type(error).__name__
        self.answers.append(Answered(service, sent, began, time.time(), status, code))

    async def poisson(self, service: str, source: random.Random, until: asyncio.Event) -> None:
        """Ask again and again until the event is set; requests of one service may overlap."""
        async with asyncio.TaskGroup() as open_requests:
            while not until.is_set():
                pause_s = source.expovariate(1 / PAUSE_S)
                try:
                    await asyncio.wait_for(until.wait(), pause_s)
                except TimeoutError:
                    open_requests.create_task(self.ask(service))


@dataclass
class Steps:
    """The time of each step of a start, by service, as watches show them. `STEPS` names them."""

    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    """Seconds from the creation of each engine pod to its readiness."""
    _seen: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, service: str, step: str, at: float, *, uid: str) -> bool:
        """Record the first time of a step of an object. Return True if it is new."""
        steps = self._seen.setdefault(uid, {})
        if step in steps:
            return False
        steps[step] = at
        self.times.setdefault(service, {}).setdefault(step, []).append(at)
        return True

    async def watch_pods(self, cluster: Cluster) -> None:
        """Record the steps of the pods until cancelled."""
        rows = watched(
            cluster,
            "pods",
            uid=".metadata.uid",
            service=r".metadata.labels.fleetkeeper\.io/service",
            component=r".metadata.labels.fleetkeeper\.io/component",
            address=".status.podIP",
            ready='.status.conditions[?(@.type=="Ready")].status',
        )
        async for at, row in rows:
            service, component, uid = row["service"], row["component"], row["uid"]
            self.note(service, f"{component} created", at, uid=uid)
            if row["address"] != NONE:
                self.note(service, f"{component} address", at, uid=uid)
            if row["ready"] == "True":
                is_new = self.note(service, f"{component} ready", at, uid=uid)
                if is_new and component == "engine":
                    self.starts.append(at - self._seen[uid]["engine created"])

    async def watch_endpoints(self, cluster: Cluster) -> None:
        """Record until cancelled when a Service got its first ready endpoint."""
        rows = watched(
            cluster,
            "endpointslices",
            name=".metadata.name",
            service=r".metadata.labels.kubernetes\.io/service-name",
            ready=".endpoints[*].conditions.ready",
        )
        async for at, row in rows:
            if "true" in row["ready"]:
                self.note(row["service"], "endpoint", at, uid=row["name"])
            else:
                self._seen.pop(row["name"], None)

    def after(self, answer: Answered, ordered: float) -> dict[str, float]:
        """Return the seconds from the order of a replica to each step that led to an answer."""
        found = {}
        for step in STEPS:
            times = self.times.get(answer.service, {}).get(step, [])
            in_time = [at for at in times if ordered - 1 <= at <= answer.began]
            if in_time:
                found[step] = in_time[0] - ordered
        return {**found, LAST: answer.began - ordered}


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
    replicas, steps = Replicas(), Steps()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        watching = [
            asyncio.create_task(replicas.watch(stage.cluster)),
            asyncio.create_task(steps.watch_pods(stage.cluster)),
            asyncio.create_task(steps.watch_endpoints(stage.cluster)),
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
    return report(clients.answers, cycled, replicas, steps, names)


def report(
    answers: list[Answered], cycled: int, replicas: Replicas, steps: Steps, names: list[str]
) -> list[str]:
    """Return a table of the requests, one of the steps of a wake, and the codes of failed requests."""
    rows, parts = [], []
    for title, part in (("Poisson", answers[:cycled]), ("all at once", answers[cycled:])):
        woke = []
        for answer in part:
            wakes = [
                at for at in replicas.wakes(answer.service) if answer.sent <= at <= answer.ended
            ]
            if wakes:
                woke.append((answer, wakes[0]))
        failed = sum(answer.status != 200 for answer in part)
        orders = [ordered - answer.sent for answer, ordered in woke]
        held = [answer.began - answer.sent for answer, _ in woke]
        after = [steps.after(answer, ordered) for answer, ordered in woke]
        waits = [found[LAST] - found["engine ready"] for found in after if "engine ready" in found]
        rows.append([title, str(len(part)), str(failed), *map(spread, (orders, held, waits))])
        times = [[found[step] for found in after if step in found] for step in (*STEPS, LAST)]
        parts.append([title, *map(spread, times)])
    sleeps = sum(replicas.sleeps(name) for name in names)
    woken = sum(len(replicas.wakes(name)) for name in names)
    codes = sorted({f"{a.status} {a.code}" for a in answers if a.status != 200})
    return [
        (
            f"{sleeps} sleeps and {woken} wakes of {len(names)} services. A pod starts in "
            f"{spread(steps.starts)}. Failed requests: {', '.join(codes) or 'none'}."
        ),
        markdown_table(
            ["requests", "sent", "failed", "order after", "answer after", "answer after ready"],
            rows,
        ),
        markdown_table(["after the order", *STEPS, LAST], parts),
    ]


def spread(values: list[float]) -> str:
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
        "a service. *Answer after*: from the request to the beginning of its answer. *Answer after ready*: from the engine pod's readiness, as a watch shows it. "
        "Below: the steps of a wake, from the order of the replica. *Endpoint*: the router is in the Service that the gateway sends to. What is "
        "between the endpoint and the answer is kube-proxy and the gateway."
    )
    section = "\n\n".join(["    .venv/bin/python benchmarks/simulated/sleep.py", text, *found, measured_on()])  # fmt: skip
    if args.write:
        write_section(HEADING, section, HERE / "RESULTS.md", TITLE)
    print(section)


if __name__ == "__main__":
    main()
