"""The router of a service (Envoy) beside vllm-router: what each adds, chooses, refuses, loses and costs.

    .venv/bin/python benchmarks/router/routers.py --vllm-router VENV/bin/vllm-router     # seven minutes

VENV has vllm-router 0.1.17 from PyPI. Replicas are stand-ins in processes of their own, which answer after
a time that is theirs. Routers alternate in rounds. The tables are medians over rounds, lowest and highest
in parentheses. `--only` runs some measures, `--quick` only shows that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import aiohttp
import psutil
import uvloop

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks/gateway"), str(ROOT / "benchmarks")]
from proxy_figures import percentile  # noqa: E402 -- on the path set above
from results_page import markdown_table, measured_on  # noqa: E402
from thin_client import HeldStreams, Target  # noqa: E402
from thin_upstream import Upstream  # noqa: E402

from tests.support.engine.engine_environment import free_port  # noqa: E402
from tests.support.engine.router_world import Engine, router_world  # noqa: E402

DIRECT, OLD, NEW = "direct", "vllm-router", "Envoy"
ROUTERS: Final = (OLD, NEW)
START_S: Final = 60.0
ARGUMENTS: Final = """
--host=127.0.0.1 --worker-startup-timeout-secs=10 --worker-startup-check-interval=1
--health-check-interval-secs=5 --health-check-timeout-secs=3 --health-failure-threshold=2
--health-success-threshold=1 --max-concurrent-requests=32768 --queue-size=0 --retry-max-retries=4
--retry-initial-backoff-ms=20 --retry-max-backoff-ms=100 --cb-failure-threshold=3 --cb-success-threshold=1
--cb-timeout-duration-secs=5 --request-timeout-secs=3600 --max-payload-size=67108864
--prometheus-host=127.0.0.1 --log-level=info
"""
"""Those of vllm-router in a pod, but for the discovery of replicas."""
REPLY: Final = "HTTP/1.1 {}\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"


@dataclass
class Replica:
    """The settings and the counts of a process with one or more replicas."""

    addresses: list[str]
    seconds: float = 0.0
    """From a request to its answer."""
    slots: int = 1 << 30
    """More requests at once get a 429."""
    running: int = 0
    received: Any = field(default_factory=lambda: multiprocessing.RawValue("L", 0))
    process: SpawnProcess | None = None

    def run(self, *ports: int) -> None:
        """Serve until the process ends."""
        uvloop.run(self._serve(ports))

    async def _serve(self, ports: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        for port in ports:
            await loop.create_server(lambda: Served(self), self.addresses, port, backlog=2048)
        await asyncio.Event().wait()


class Served(Upstream):
    """One connection of a replica."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica
        self._path = b""

    def on_url(self, url: bytes) -> None:
        """Keep the path."""
        self._path = url

    def on_message_complete(self) -> None:
        """Answer: checks at once, and requests after their time."""
        assert self._transport is not None
        if self._parser.get_method() == b"GET":
            known = self._path in {b"/health", b"/healthz/ready", b"/v1/models"}
            self._transport.write(REPLY.format("200 OK" if known else "404 Not Found").encode())
            return
        self._replica.received.value += 1
        if self._replica.running >= self._replica.slots:
            self._body = b""
            self._transport.write(REPLY.format("429 Too Many Requests").encode())
        elif self._replica.seconds:
            self._replica.running += 1
            self._loop.call_later(self._replica.seconds, self._late)
        else:
            super().on_message_complete()

    def _late(self) -> None:
        self._replica.running -= 1
        if self._transport is not None:
            super().on_message_complete()


@dataclass(frozen=True)
class Side:
    """Where requests go, and the process whose costs count."""

    name: str
    target: Target
    pid: int = 0

    def tree(self) -> list[psutil.Process]:
        """Return the process and its children."""
        process = [psutil.Process(self.pid)] if self.pid else []
        return [
            *process,
            *(child for parent in process for child in parent.children(recursive=True)),
        ]

    def cpu_s(self) -> float:
        """Return the processor time used so far."""
        return float(sum(sum(process.cpu_times()[:2]) for process in self.tree()))

    def memory_mib(self) -> list[float]:
        """Return the resident memory, and the proportional share of it."""
        found = [process.memory_full_info() for process in self.tree()]
        return [sum(used.rss for used in found) / 2**20, sum(used.pss for used in found) / 2**20]


@asynccontextmanager
async def surroundings(
    args: argparse.Namespace, replicas: Sequence[Replica], names: Iterable[str] = ROUTERS
) -> AsyncIterator[dict[str, Side]]:
    """Run replicas and routers, and end them all afterwards."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fk-routers-")))
        world = await stack.enter_async_context(router_world(folder))
        for replica in replicas:
            process = multiprocessing.get_context("spawn").Process(
                target=replica.run, args=(world.port, world.health_port), daemon=True
            )
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            replica.process = process
            world.engines += [Engine(address) for address in replica.addresses]
        for engine in world.engines:
            await answers(f"http://{engine.address}:{world.health_port}/healthz/ready")
        world.publish()
        sides = {DIRECT: Side(DIRECT, Target(world.port, {}))}
        if OLD in names:
            sides[OLD] = await stack.enter_async_context(
                old_router(args, world.port, world.engines)
            )
        if NEW in names:
            router = await world.router()
            assert router.process is not None
            sides[NEW] = Side(
                NEW, Target(int(router.url.rpartition(":")[2]), {}), router.process.pid
            )
        yield sides


@asynccontextmanager
async def old_router(
    args: argparse.Namespace, port: int, engines: Sequence[Engine]
) -> AsyncIterator[Side]:
    """Run vllm-router."""
    own = free_port()
    # It takes this policy for no single replica, where each policy does the same.
    policy = "power_of_two" if len(engines) > 1 else "round_robin"
    words = [*shlex.split(ARGUMENTS), f"--policy={policy}", f"--port={own}"]
    words += [f"--prometheus-port={free_port()}", "--worker-urls"]
    words += [f"http://{engine.address}:{port}" for engine in engines]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        args.vllm_router, *words, stdout=quiet, stderr=quiet
    )
    try:
        await answers(f"http://127.0.0.1:{own}/readiness")
        yield Side(OLD, Target(own, {}), process.pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answers(url: str) -> None:
    """Wait until an address answers 200."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


@dataclass
class Sent:
    """What clients saw: the status of each request (0: no answer), and the times of the good ones."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def failed(self) -> int:
        """Return how many got no answer with 200."""
        return self.statuses.total() - len(self.seconds)

    def ms(self, share: float) -> float:
        """Return a percentile of the times."""
        return percentile(self.seconds, share) * 1e3


async def send(side: Side, clients: int, go: Callable[[], bool]) -> Sent:
    """Let so many clients send one request after another, as long as it continues."""
    found, request, began = Sent(), side.target.request(max_tokens=3), perf_counter()

    async def client() -> None:
        connection = await side.target.connect()
        while go():
            if not connection.open:
                connection = await side.target.connect()
            sent = perf_counter()
            answer = await connection.send(request)
            found.statuses[answer.status if answer.ended else 0] += 1
            if answer.ended and answer.status == 200:
                found.seconds.append(perf_counter() - sent)
        connection.close()

    async with asyncio.timeout(120.0), asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    found.took_s = perf_counter() - began
    return found


def times(count: int) -> Callable[[], bool]:
    """Return what is true so many times."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def shown(values: Iterable[float]) -> str:
    """Return the median, and the lowest and the highest value if they differ."""
    found = list(values)
    low, middle, high = (
        f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
        for value in (min(found), median(found), max(found))
    )
    return low if low == high else f"{middle} ({low} to {high})"


async def table(
    args: argparse.Namespace,
    names: Iterable[str],
    headings: Sequence[str],
    one: Callable[[str], Awaitable[Sequence[float]]],
) -> str:
    """Measure in rounds, each in another order; return a row of figures for each name."""
    order = list(names)
    found: dict[str, list[Sequence[float]]] = {name: [] for name in order}
    for number in range(args.rounds):
        start = number % len(order)
        for name in [*order[start:], *order[:start]]:
            found[name].append(await one(name))
    rows = [
        [name, *(shown(each) for each in zip(*rounds, strict=True))]
        for name, rounds in found.items()
    ]
    return markdown_table(["", *headings], rows)


async def latency(args: argparse.Namespace) -> list[str]:
    """Measure what a router adds to one fast replica."""
    count = 2000 // args.part

    async def alone(name: str) -> Sequence[float]:
        await send(sides[name], 1, times(count // 4))
        found = await send(sides[name], 1, times(count))
        return [found.ms(0.5), found.ms(0.99), found.failed]

    async def crowd(name: str) -> Sequence[float]:
        await send(sides[name], 32, times(count))
        before, total = sides[name].cpu_s(), 10 * count
        found = await send(sides[name], 32, times(total))
        spent = (sides[name].cpu_s() - before) * 1e3 / total
        return [found.ms(0.5), found.ms(0.99), total / found.took_s, spent, found.failed]

    head = ["P50, ms", "P99, ms"]
    more = [*head, "requests/s", "CPU seconds for 1,000 requests", "failed"]
    async with surroundings(args, [Replica(["127.0.0.1"])]) as sides:
        return [
            f"One replica that answers at once; one client, {count} requests a round",
            await table(args, sides, [*head, "failed"], alone),
            f"32 clients, {10 * count} requests a round",
            await table(args, sides, more, crowd),
        ]


async def slow_replica(args: argparse.Namespace) -> list[str]:
    """Measure how often a slow replica is chosen."""
    count = 1200 // args.part
    replicas = [Replica([f"127.1.0.{n}"], 0.2 if n == 1 else 0.05) for n in range(1, 5)]

    async def one(name: str) -> Sequence[float]:
        before = replicas[0].received.value
        found = await send(sides[name], 32, times(count))
        share = (replicas[0].received.value - before) * 100 / count
        return [share, found.ms(0.5), found.ms(0.99), found.failed]

    head = ["to the slow one, %", "P50, ms", "P99, ms", "failed"]
    async with surroundings(args, replicas) as sides:
        return [
            f"Three replicas of 50 ms and one of 200 ms; 32 clients, {count} requests a round",
            await table(args, ROUTERS, head, one),
        ]


async def full_replica(args: argparse.Namespace) -> list[str]:
    """Measure how many clients see that one of two replicas is full."""
    head = ["429 seen by clients, %", "other failures", "tries of the full one a request"]
    parts = []
    for slots, clients, count in ((0, 32, 640), (0, 256, 2048), (16, 256, 2048)):
        total = count // args.part
        replicas = [Replica(["127.1.0.1"], 0.25, slots), Replica(["127.1.0.2"], 0.25)]

        async def one(name: str, clients: int = clients, total: int = total) -> Sequence[float]:
            before = replicas[0].received.value  # noqa: B023
            found = await send(sides[name], clients, times(total))
            tries = (replicas[0].received.value - before) / total  # noqa: B023
            refused = found.statuses[429]
            figures = [refused * 100 / total, found.failed - refused, tries]
            return [*figures, found.ms(0.5), found.ms(0.99)]

        async with surroundings(args, replicas) as sides:
            parts += [
                f"Two replicas of 250 ms, one with {slots} slots; {clients} clients, {total} requests a round",
                await table(args, ROUTERS, [*head, "P50, ms", "P99, ms"], one),
            ]
    return parts


async def killed_replica(args: argparse.Namespace) -> list[str]:
    """Measure what clients see when one of four replicas is killed."""
    statuses = {name: Counter[int]() for name in ROUTERS}

    async def one(name: str) -> Sequence[float]:
        replicas = [Replica([f"127.1.0.{n}"], 0.05) for n in range(1, 5)]
        async with surroundings(args, replicas, [name]) as sides:
            end = perf_counter() + 8.0
            task = asyncio.create_task(send(sides[name], 16, lambda: perf_counter() < end))
            await asyncio.sleep(2.0)
            assert replicas[0].process is not None
            replicas[0].process.kill()
            found = await task
        statuses[name] += found.statuses
        total = found.statuses.total()
        twice = sum(replica.received.value for replica in replicas) - total
        return [total, found.failed, twice, max(found.seconds) * 1e3]

    head = ["requests", "failed", "received by replicas, less requests", "longest good one, ms"]
    return [
        "Four replicas of 50 ms, 16 clients for 8 s; one is killed after 2 s",
        await table(args, ROUTERS, head, one),
        "Answers of all rounds by status (0: none): "
        + "; ".join(f"{name} {dict(sorted(counts.items()))}" for name, counts in statuses.items()),
    ]


async def memory(args: argparse.Namespace) -> list[str]:
    """Measure memory, idle and with open streams, each time of a new router."""

    async def one(name: str) -> Sequence[float]:
        async with surroundings(args, [Replica(["127.0.0.1"])], [name]) as sides:
            await asyncio.sleep(2.0)
            idle = sides[name].memory_mib()
            async with HeldStreams(sides[name].target, args.streams) as held:
                return [*idle, *sides[name].memory_mib(), held.open]

    head = ["idle: RSS, MiB", "PSS, MiB", "with streams: RSS, MiB", "PSS, MiB", "open streams"]
    return [f"{args.streams} open streams", await table(args, ROUTERS, head, one)]


async def hundred_replicas(args: argparse.Namespace) -> list[str]:
    """Measure what a router costs without requests."""
    seconds = 20.0 / args.part

    async def one(name: str) -> Sequence[float]:
        before = sides[name].cpu_s()
        await asyncio.sleep(seconds)
        return [(sides[name].cpu_s() - before) * 60 / seconds, *sides[name].memory_mib()]

    head = ["CPU seconds a minute", "RSS, MiB", "PSS, MiB"]
    async with surroundings(args, [Replica([f"127.1.0.{n}" for n in range(1, 101)])]) as sides:
        await asyncio.sleep(3.0)
        return [
            f"100 replicas, no request, {seconds:g} s a round; Envoy checks each replica each second, vllm-router each 5 s",
            await table(args, ROUTERS, head, one),
        ]


MEASURES: Final = {
    measure.__name__: measure
    for measure in (latency, slow_replica, full_replica, killed_replica, memory, hundred_replicas)
}


async def measure(args: argparse.Namespace) -> None:
    """Run the measures, and print the tables of each when they are known."""
    print(f"{measured_on()} {args.rounds} rounds.", flush=True)
    for name in args.only or MEASURES:
        print("\n" + "\n\n".join(await MEASURES[name](args)), flush=True)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-router", required=True, help="path of its program")
    parser.add_argument("--only", nargs="+", choices=MEASURES, help="measures to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--quick", dest="part", action="store_const", const=10, default=1)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(measure(args))


if __name__ == "__main__":
    main()
