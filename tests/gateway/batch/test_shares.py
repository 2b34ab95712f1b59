"""A key with 100 lines beside another key that takes all it can: its time is at most twice that alone.

The engine only waits, so what is compared are the shares of the batch process and the gateway, not processors.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.batch.batch_engine import BatchEngine
from tests.support.batch.batch_process import (
    BatchProcess,
    BatchSurroundings,
    batch_surroundings,
    ended,
    line,
    submit,
    until_engine,
)
from tests.support.batch.batch_tree import watched_memory
from tests.support.gateway.gateway_api import service
from tests.support.gateway.gateway_surroundings import NAMESPACE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LINES, LINE_S = 100, 1.0
PLACES: Final = BatchSettings().batch_concurrency
"""As shipped: of fewer places, too few are kept for others to run 100 lines in twice the time."""
FACTOR, NOISE_S = 2.0, 2.0
"""Both times have steps of the leader and of polling, which may come late where others use the processor."""
LONG_S: Final = 300.0
"""Of a line that still runs when the last ones of its attack begin, however slowly they are accepted."""
HOUR_S: Final = 3600.0
TRIES: Final = 3
"""Of B beside each attack, the best counts: a busy host delays one, and a key that takes too much delays all."""
MIB: Final = 1 << 20
PATIENCE_S: Final = 600.0
HUNG, LARGE, SUSPENDED = "hung", "large", "suspended"
"""Models of services that the attacker alone uses. What is large has an engine of its own: it costs that time."""
REFUSES: Final = "refuses-{}"


@dataclass(frozen=True)
class Size:
    """How much the attacker does."""

    models: int
    batches: int
    answers: int
    """Of 64 MiB."""
    lines: int
    """Of almost 16 MiB."""


USUAL: Final = Size(models=30, batches=60, answers=12, lines=3)
FULL: Final = Size(models=250, batches=2000, answers=100, lines=12)


@dataclass
class Attack:
    """The other key, and what it has asked for."""

    world: BatchSurroundings
    process: BatchProcess
    large: BatchEngine
    client: openai.AsyncOpenAI
    size: Size
    batches: list[str] = field(default_factory=list)

    async def submit(self, lines: Iterable[dict[str, Any]]) -> None:
        self.batches.append(await submit(self.client, lines, window="5m"))

    async def submit_all(self, inputs: Iterable[list[dict[str, Any]]]) -> None:
        turns = asyncio.Semaphore(8)

        async def one(lines: list[dict[str, Any]]) -> None:
            async with turns:
                await self.submit(lines)

        await asyncio.gather(*(one(lines) for lines in inputs))

    async def until_refused(self, least: int) -> None:
        before = await self.refused()

        async def more() -> bool:
            return await self.refused() >= before + least

        await self.process.until(more, "no line was refused")

    async def refused(self) -> float:
        return await self.process.metric(
            "fleetkeeper_gateway_batch_lines_total", 'outcome="refused"'
        )

    async def models(self) -> None:
        """Many model names, each with lines that take their time."""
        await self.submit_all(
            [line(number, model=f"m-{name}", seconds=LONG_S) for number in range(32)]
            for name in range(self.size.models)
        )
        await until_engine(self.world.engine, "running", PLACES // 2)

    async def small_batches(self) -> None:
        """Many batches of two lines."""
        await self.submit_all(
            [line(number, seconds=LONG_S) for number in range(2)] for _ in range(self.size.batches)
        )
        await until_engine(self.world.engine, "running", min(self.size.batches, PLACES // 2))

    async def hung(self) -> None:
        """A service of its own that never answers."""
        await self.submit(line(number, model=HUNG, seconds=HOUR_S) for number in range(1000))
        await until_engine(self.world.engine, "running", PLACES // 2)

    async def refusing(self, status: int) -> None:
        """A service of its own that asks for five minutes."""
        refusal = {"model": REFUSES.format(status), "refusal": status, "retry_after": 300}
        await self.submit(line(number, **refusal) for number in range(1000))
        await self.until_refused(1)

    async def suspended(self) -> None:
        """A service of its own without replicas."""
        await self.submit(line(number, model=SUSPENDED) for number in range(1000))
        await self.until_refused(1)

    async def large_answers(self) -> None:
        """Answers of 64 MiB, of which no more than a few MiB are kept."""
        before = await self.large.asked("answered")
        await self.submit(
            line(number, model=LARGE, answer_bytes=64 * MIB) for number in range(self.size.answers)
        )
        await until_engine(self.large, "answered", before + 1)

    async def large_lines(self) -> None:
        """Lines of almost 16 MiB."""
        await self.submit(
            line(number, model=LARGE, pad="x" * (16 * MIB - 4096), seconds=5.0)
            for number in range(self.size.lines)
        )
        await until_engine(self.large, "running", 1)

    async def every_place(self) -> None:
        """An hour-long line in every place, of the service that the other key uses too."""
        await self.submit_all(
            [line(number, seconds=HOUR_S) for number in range(PLACES)] for _ in range(2)
        )
        await until_engine(self.world.engine, "running", PLACES * 7 // 8)

    def all(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return all attacks by name."""
        size = self.size
        return {
            f"{size.models} model names": self.models,
            f"{size.batches} small batches": self.small_batches,
            "a hung service": self.hung,
            "a service that answers 429": lambda: self.refusing(429),
            "a service that answers 503": lambda: self.refusing(503),
            "a suspended service": self.suspended,
            f"{size.answers} answers of 64 MiB": self.large_answers,
            f"{size.lines} lines of 16 MiB": self.large_lines,
            "an hour-long line in every place": self.every_place,
        }

    async def end(self) -> None:
        """Cancel everything, and wait for its end."""
        for batch_id in self.batches:
            with contextlib.suppress(openai.BadRequestError, openai.ConflictError):  # it has ended
                await self.client.batches.cancel(batch_id)
        for batch_id in self.batches:
            await ended(self.client, batch_id, patience_s=PATIENCE_S)
        self.batches.clear()


async def seconds_of(client: openai.AsyncOpenAI, most_s: float = PATIENCE_S) -> float:
    """Return the time from the upload of 100 lines to their results; infinite if it is more than `most_s`."""
    began = time.monotonic()
    lines = [line(number, seconds=LINE_S) for number in range(LINES)]
    batch_id = await submit(client, lines)
    try:
        batch = await ended(client, batch_id, patience_s=most_s)
    except TimeoutError:
        await client.batches.cancel(batch_id)
        return math.inf
    took_s = time.monotonic() - began
    assert (batch.status, batch.request_counts.completed) == ("completed", LINES)
    return took_s


@contextlib.asynccontextmanager
async def running(engine: BatchEngine) -> AsyncIterator[None]:
    """Run an engine."""
    try:
        await asyncio.to_thread(engine.start)
        yield
    finally:
        engine.kill()


@contextlib.asynccontextmanager
async def two_keys(tmp_path: Path, size: Size) -> AsyncIterator[tuple[openai.AsyncOpenAI, Attack]]:
    """Run a batch process; provide the client of a key, and the other key."""
    ports = free_ports(2)
    directory = tmp_path / LARGE
    directory.mkdir()
    large = BatchEngine(directory, ports[0])
    async with batch_surroundings(tmp_path, engine_most=100_000) as world, running(large):
        names = [HUNG, LARGE, *map(REFUSES.format, (429, 503))]
        for name in (*names, *(f"m-{number}" for number in range(size.models))):
            world.api.put(service(NAMESPACE, name))
        gone = service(NAMESPACE, SUSPENDED)
        gone["spec"]["suspend"] = True
        world.api.put(gone)
        world.serve.kill()
        others = {f"{LARGE}.{NAMESPACE}.svc": ports[0], f"{SUSPENDED}.{NAMESPACE}.svc": ports[1]}
        world.serve.addresses = {**world.serve.addresses, **others}
        await world.serve.start().ready()
        key = world.add_key("attacker")
        process = await world.batch(BATCH_END_SECONDS="1", BATCH_KEY_ACTIVE="3000").start().ready()
        async with (
            watched_memory(process, "beside all attacks"),
            process.client(world.keys["client"], timeout=PATIENCE_S) as client,
            process.client(key, timeout=PATIENCE_S) as other,
        ):
            yield client, Attack(world, process, large, other, size)
        assert process.tracebacks() == []


@pytest.mark.promise("batch-quotas")
@pytest.mark.parametrize(
    "size", [USUAL, pytest.param(FULL, marks=pytest.mark.exhaustive)], ids=["usual", "full"]
)
async def test_no_key_delays_the_batch_of_another_beyond_its_share(
    tmp_path: Path, size: Size
) -> None:
    unfair = []
    print("\n| B's 100 lines beside A's | alone | beside | ratio |\n| --- | --- | --- | --- |")
    async with two_keys(tmp_path, size) as (client, attack):
        await seconds_of(client)  # the first one imports and connects
        for name, begin in attack.all().items():
            alone_s = await seconds_of(client)
            await begin()
            tries = [await seconds_of(client, 10 * alone_s + 20)]
            while min(tries) > FACTOR * alone_s + NOISE_S and len(tries) < TRIES:
                tries.append(await seconds_of(client, 10 * alone_s + 20))
            beside_s = min(tries)
            await attack.end()
            if beside_s > FACTOR * alone_s + NOISE_S:  # the host may have become busy since
                alone_s = max(alone_s, await seconds_of(client))
            ratio = beside_s / alone_s
            row = f"| {name} | {alone_s:.1f} s | {beside_s:.1f} s | {ratio:.2f} |"
            print(row, flush=True)
            if beside_s > FACTOR * alone_s + NOISE_S:
                unfair.append(row)
    assert unfair == []
