"""One pod's control port, whatever it answers, delays neither the reads nor the limits requests of others."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper.adapters import engine
from fleetkeeper.adapters.engine import Engines, Signer
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.types import Admission, Limits, LimitsRequest, PodView
from fleetkeeper.runtime.autoscaler.readings import Target
from fleetkeeper.runtime.autoscaler.sources import MeasuredSource
from fleetkeeper.runtime.queue import Key
from tests.support.autoscale.control_cases import NOW, sample
from tests.support.autoscale.engine_metrics import metrics_text, parse_sample
from tests.support.guards import GUARD_S
from tests.support.operators.contained import new_defects

EDGES = Edges(0.5, 0.05)
SIGNER = Signer(Ed25519PrivateKey.generate(), epoch=lambda: 1, may_sign=lambda: True)
GOOD = metrics_text(sample(NOW), EDGES).encode()
BOMB = gzip.compress(b"\n" * (64 << 20))


@dataclass
class Port:
    """The control ports of many pods: one socket for all of 127.0.0.0/8, told apart by address."""

    hostile: dict[str, Callable[[asyncio.StreamWriter], Any]] = field(default_factory=dict)
    held: int = 0
    given_up: int = 0
    answered: int = 0
    seen: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request; hostile pods answer in their own way."""
        address = writer.get_extra_info("sockname")[0]
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if address in self.hostile:
                await self.hostile[address](writer)
                return
            body = b"{}" if head.startswith(b"PUT") else GOOD
            writer.write(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            writer.write(body)
            await writer.drain()
            async with self.seen:
                self.answered += 1
                self.seen.notify_all()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def hold(self, writer: asyncio.StreamWriter) -> None:
        """A tarpit: one byte of a header a second, until the caller gives up."""
        async with self.seen:
            self.held += 1
            self.seen.notify_all()
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1.0)
        finally:
            self.given_up += 1

    async def until_held(self, count: int) -> None:
        """Waits until so many callers hang."""
        async with asyncio.timeout(GUARD_S), self.seen:
            await self.seen.wait_for(lambda: self.held >= count)

    async def until_answered(self, count: int) -> None:
        """Waits until so many were answered well."""
        async with asyncio.timeout(GUARD_S), self.seen:
            await self.seen.wait_for(lambda: self.answered >= count)


def answering(body: bytes, headers: bytes = b"") -> Callable[[asyncio.StreamWriter], Any]:
    """A pod that gives this body, and then nothing more."""

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + headers + b"\r\n" + body)
        await writer.drain()

    return give


async def endless(writer: asyncio.StreamWriter) -> None:
    """A pod whose answer never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while True:
        writer.write(b"fleetkeeper_steps_total 1\n" * 4096)
        await writer.drain()


@asynccontextmanager
async def ports() -> AsyncIterator[tuple[Port, Engines]]:
    """Loopback control ports, and the adapter that calls them."""
    port = Port()
    tasks: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(port.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, "0.0.0.0", 0)
    engines = Engines(lambda: NOW, SIGNER, port=server.sockets[0].getsockname()[1])
    try:
        yield port, engines
    finally:
        await engines.close()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def address(number: int) -> str:
    """The address of pod `number`."""
    return str(ip_address("127.1.0.1") + number)


def view(number: int) -> PodView:
    """A ready pod of its own address."""
    return PodView(f"pod-{number}", f"uid-{number}", NOW - 900, True, NOW - 800, ip=address(number))


def request(number: int) -> LimitsRequest:
    """Limits for a pod."""
    pod = view(number)
    return LimitsRequest(pod.name, pod.uid, pod.ip, Limits(64, 2048), Admission(), 120.0, 1)


def target(number: int) -> Target:
    """A service with this one pod."""
    return Target(Key("team-a", f"service-{number}"), EDGES, (view(number),))


async def test_orders_are_answered_while_every_read_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and limits requests share no slot: not one tarpit was given up when the last request is answered."""
    monkeypatch.setattr(engine, "TIMEOUT_S", GUARD_S)
    async with ports() as (port, engines):
        port.hostile = {address(number): port.hold for number in range(100)}
        reads = asyncio.create_task(
            engines.scrape_samples([(view(n), EDGES) for n in range(100)], deadline_s=GUARD_S)
        )
        await port.until_held(16)
        async with asyncio.timeout(GUARD_S):
            outcomes = await engines.put_limits([request(n) for n in range(100, 140)])
        assert all(outcome.succeeded for outcome in outcomes)
        assert port.given_up == 0
        reads.cancel()
        await asyncio.gather(reads, return_exceptions=True)


async def test_reads_are_answered_while_every_order_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round."""
    monkeypatch.setattr(engine, "TIMEOUT_S", GUARD_S)
    async with ports() as (port, engines):
        port.hostile = {address(number): port.hold for number in range(40)}
        requests = asyncio.create_task(engines.put_limits([request(n) for n in range(40)]))
        await port.until_held(16)
        source = MeasuredSource(
            None, engines, may_send=lambda: True, monotonic=lambda: 0.0, deadline_s=GUARD_S,
            defects=new_defects(),
        )  # fmt: skip
        async with asyncio.timeout(GUARD_S):
            readings = await source.observe([target(n) for n in range(100, 140)], NOW)
        assert len(readings.samples) == 40
        assert port.given_up == 0
        requests.cancel()
        await asyncio.gather(requests, return_exceptions=True)


async def test_forty_pods_that_begin_to_hang_delay_no_order_of_the_same_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others are answered while each of the forty still holds its call."""
    monkeypatch.setattr(engine, "TIMEOUT_S", GUARD_S)
    async with ports() as (port, engines):
        port.hostile = {address(number): port.hold for number in range(40)}
        requests = asyncio.create_task(engines.put_limits([request(n) for n in range(100)]))
        await port.until_answered(60)
        assert port.given_up == 0
        requests.cancel()
        await asyncio.gather(requests, return_exceptions=True)


@pytest.mark.slow
async def test_from_the_second_tick_on_a_hundred_tarpits_delay_no_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pods that gave nothing at their last turn wait in a lane of their own."""
    monkeypatch.setattr(engine, "TIMEOUT_S", GUARD_S)
    async with ports() as (port, engines):
        port.hostile = {address(number): port.hold for number in range(100)}
        targets = [target(number) for number in range(110)]
        good = {item.key for item in targets[100:]}
        source = MeasuredSource(
            None, engines, may_send=lambda: True, monotonic=asyncio.get_running_loop().time,
            deadline_s=6.0, defects=new_defects(),  # a busy host takes seconds for the ten
        )  # fmt: skip
        await source.observe(targets, NOW)
        for tick in range(3):
            readings = await source.observe(targets, NOW)
            assert set(readings.samples) == good, tick


async def test_pods_known_to_hang_do_not_hold_up_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tick goes on with what the others gave, long before a hanging call ends."""
    monkeypatch.setattr(engine, "TIMEOUT_S", 10 * GUARD_S)
    async with ports() as (port, engines):
        port.hostile = {address(number): port.hold for number in range(20)}
        pods = [(view(number), EDGES) for number in range(30)]
        doubted = {f"uid-{number}" for number in range(20)}
        async with asyncio.timeout(GUARD_S):
            found = await engines.scrape_samples(pods, deadline_s=10 * GUARD_S, doubted=doubted)
    assert {uid for uid, row in found.items() if row is not None} == {
        f"uid-{number}" for number in range(20, 30)
    }


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("garbage", answering(b"\x00\xff" * 100_000)),
        ("endless", endless),
        ("compressed", answering(BOMB, b"Content-Encoding: gzip\r\n")),
        ("empty lines", answering(b"\n" * (3 << 20))),
        ("one long line", answering(b"fleetkeeper_steps_total" + b"1" * (3 << 20))),
        ("our lines without end", answering(b"fleetkeeper_steps_total 1\n" * 120_000)),
    ],
)
async def test_a_hostile_answer_takes_little_memory_and_stops_nobody(
    kind: str, answer: Callable[[asyncio.StreamWriter], Any]
) -> None:
    """Beside eight such pods the ninth is read; bytes are dropped as they come, before they are parsed."""
    async with ports() as (port, engines):
        port.hostile = {address(number): answer for number in range(8)}
        targets = [target(number) for number in range(9)]
        source = MeasuredSource(
            None, engines, may_send=lambda: True, monotonic=lambda: 0.0, deadline_s=GUARD_S,
            defects=new_defects(),
        )  # fmt: skip
        tracemalloc.start()
        try:
            readings = await source.observe(targets, NOW)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert set(readings.samples) == {targets[8].key}, kind
        assert peak < 16 << 20, f"{kind}: {peak >> 20} MiB"


async def test_an_order_is_not_answered_in_megabytes() -> None:
    """64 KiB are plenty for an outcome, and are parsed at once."""
    async with ports() as (port, engines):
        port.hostile = {address(0): answering(b'{"error": "' + b"x" * (1 << 20) + b'"}')}
        (outcome,) = await engines.put_limits([request(0)])
    assert not outcome.succeeded
    assert "larger" in outcome.detail


def test_thousands_of_foreign_lines_change_nothing() -> None:
    """An engine exposes its own metrics too; only those of the contract are parsed."""
    foreign = b"".join(b'vllm:something{model="m",le="%d"} 1.0\n' % i for i in range(20_000))
    alone = parse_sample("chat-0", NOW, GOOD, EDGES)
    assert alone is not None
    assert parse_sample("chat-0", NOW, foreign + GOOD + foreign, EDGES) == alone
    assert replace(alone, source=Source.DIRECT) == alone
