"""What writers, finalizers and faults do in the model of a log (`log_model`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fleetkeeper_gateway.batch.interfaces import StorageError
from fleetkeeper_gateway.batch.model import Attempt, Result
from fleetkeeper_gateway.batch.storage import paths
from fleetkeeper_gateway.batch.storage.chunk_log import ChunkLog
from tests.gateway.batch.storage.log_model import PATH, STORE, Call, Notes, Script


def result(line: int, writer: str, *, ran: bool = True) -> Result:
    """A result of a line that says who wrote it."""
    return Result(line, ran, f"{line} of {writer}".encode(), ran)


def writer(
    name: str,
    lines: range,
    *,
    first: Iterable[int] = (),
    noted: Sequence[Attempt] = (),
    log_class: type[ChunkLog] = ChunkLog,
) -> Script:
    """A worker: it reads the log, writes some results and attempts, then all others, and closes it."""

    async def work(notes: Notes) -> None:
        log = log_class(STORE, PATH, lines)
        await _again(log.read)

        async def write(
            numbers: Iterable[int], attempts: Sequence[Attempt], *, close: bool
        ) -> None:
            some = [result(number, name) for number in numbers if number not in log.done]
            counted = await _again(lambda: log.append(some, attempts, close=close))
            notes.counted.update(one for one in some if one.line in counted)

        if first or noted:
            await write(first, noted, close=False)
        while not log.closed:
            await write(lines, (), close=True)
        notes.closed = True

    return work


def finalizer(lines: range, log_class: type[ChunkLog] = ChunkLog) -> Script:
    """The end of a cancelled batch: it closes the log, and reads what will be in the output."""

    async def work(notes: Notes) -> None:
        log = log_class(STORE, PATH, lines)
        await _again(log.read)
        while not log.closed:
            some = [result(number, "end", ran=False) for number in lines if number not in log.done]
            counted = await _again(partial(log.append, some, close=True))
            notes.counted.update(one for one in some if one.line in counted)
        notes.closed = True
        notes.output = tuple([one async for one in log.results()])

    return work


def damage(number: int) -> Script:
    """What changes a part that exists."""

    async def work(_: Notes) -> None:
        await Call("damage", PATH(number))

    return work


def mark(number: int) -> Script:
    """A reader that finds a part damaged which is whole for all others."""

    async def work(_: Notes) -> None:
        if await STORE.read(PATH(number)) is not None:
            await STORE.create(PATH(number) + paths.DAMAGED, b"")

    return work


async def _again(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call that failed, as workers and finalizers do."""
    try:
        return await call()
    except StorageError:
        return await call()
