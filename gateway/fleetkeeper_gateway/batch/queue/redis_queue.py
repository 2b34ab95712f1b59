"""The queue: what `interfaces.Queue` promises, by scripts in Redis.

**Order.** The lines of a model are given out by these rules:

1. Batches whose completion windows end in the same hour are a class. Three of four lines go to the
   class with the earliest deadlines that has waiting lines; the fourth goes to any class. So with K
   keys that wait, each of them gets at least a (4 * K)th of the model's lines, whatever deadlines the
   others have. A key whose route has no room is passed over (`take`).
2. In a class (or among all), the key that got the fewest lines there is next. A key that begins to
   wait starts just behind the one that got the fewest. A turn is at most 8 lines while others wait.
3. Of the batches of that key, the one with the earliest deadline is next, and its lines in order.

**Leases.** A line that was taken belongs to this process for 30 s by the server's clock, or longer if
it is renewed. Each lease has a fence: a number that only grows, also from one epoch to the next. A lease
that ran out ends at the next check (once a second) of any process. Until then it can still be renewed
and committed. Attempts are counted in Redis; after a rebuild a line without a result begins at 1 again.

**Epochs.** See `recovery`. Leases of an earlier epoch are lost: `renew` names them, and `commit` does
not record them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import structlog

from fleetkeeper_gateway.batch import metrics as batch_metrics
from fleetkeeper_gateway.batch.interfaces import NO_ROUTES, Commit, QueueDown, Taken
from fleetkeeper_gateway.batch.model import BatchRecord, Counts, LineRef, Validated
from fleetkeeper_gateway.batch.queue import scripts
from fleetkeeper_gateway.batch.queue.link import Link
from fleetkeeper_gateway.batch.queue.metrics import QueueMetrics
from fleetkeeper_gateway.batch.queue.names import fence_base, lease_of
from fleetkeeper_gateway.batch.queue.records import (
    Answer,
    as_list,
    as_number,
    as_text,
    batch_arguments,
    line_arguments,
    record_of,
    taken_of,
)
from fleetkeeper_gateway.batch.queue.timing import Timing
from fleetkeeper_gateway.batch.queue.wake import Wake

log = structlog.get_logger(__name__)

T = TypeVar("T")

PART = 500
"""Lines of one call. Longer ones would hold up the limits, which use the same server."""
RECORDS = 4096
"""Records of batches that a process remembers."""


class RedisQueue:
    """The queue of one process."""

    def __init__(
        self, link: Link, wake: Wake, process: str, timing: Timing, metrics: QueueMetrics
    ) -> None:
        self._link = link
        self._wake = wake
        self._process = process
        self._timing = timing
        self._metrics = metrics
        self._records: OrderedDict[str, BatchRecord] = OrderedDict()
        self._returns: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        link.on_lines_wait(wake.set)

    @property
    def up(self) -> bool:
        """Return whether lines can be taken and committed."""
        return self._link.up

    async def until_up(self, wait_s: float) -> None:
        """Wait until lines can be taken and committed.

        Raises:
            QueueDown: they cannot after this time.
        """
        await self._link.until_up(wait_s)

    async def run(self) -> None:
        """Keep the connections. Runs until `close` is called or it is cancelled."""
        self._ended.clear()
        tasks: list[asyncio.Task[object]] = [
            asyncio.create_task(self._link.run()),
            asyncio.create_task(self._wake.run()),
            asyncio.create_task(self._closing.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._returns:
                await asyncio.wait(self._returns, timeout=self._timing.call_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._ended.set()

    async def close(self) -> None:
        """End `run`, and close the connections. Leases that are still held run out."""
        self._closing.set()
        await self._ended.wait()

    async def add(
        self, record: BatchRecord, validated: Validated, lines: Sequence[LineRef]
    ) -> None:
        """Queue the lines of a batch. Idempotent, also if an earlier call ended in the middle."""
        batch = batch_arguments(record, validated)
        added = 0
        while True:
            part = lines[added : added + PART]
            answer = await self._link.call(scripts.ADD, *batch, added, *line_arguments(part))
            added = as_number(answer[1])
            # Negative: the batch was removed meanwhile. It has ended.
            if added < 0 or added >= len(lines):
                return

    async def take(
        self, free: Mapping[str, int], wait_s: float, routes: Mapping[str, str] = NO_ROUTES
    ) -> Sequence[Taken]:
        """Take lines under leases, at most so many of each route.

        Without lines it waits for some, at most this time. If Redis cannot be asked, it waits as
        long before it raises QueueDown.
        """
        numbers = {route: number for number, route in enumerate(free, start=1)}
        words: list[str | int] = [len(free), *free.values()]
        for flow, route in routes.items():
            words += (flow, numbers[route])
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        if not self._link.up:
            await self._link.until_up(wait_s)
        while True:
            woken = self._wake.next()
            taken = await self._take(self._process, self._timing.age_ms(), free.get("*", 0), *words)
            left_s = end - loop.time()
            if taken or left_s <= 0:
                return taken
            try:
                async with asyncio.timeout(left_s):
                    await woken.wait()
            except TimeoutError:
                return ()

    async def renew(self, taken: Iterable[Taken]) -> set[Taken]:
        """Renew leases that are still ours. Return those that are not."""
        lost: set[Taken] = set()
        for part in _parts(list(taken)):
            words = [value for each in part for value in self._lease(each)]
            answer = await self._link.call(
                scripts.RENEW, self._process, self._timing.age_ms(), *words
            )
            lost |= {part[as_number(position)] for position in answer[1:]}
        return lost

    async def give_back(self, taken: Iterable[Taken], *, attempt_counts: bool) -> None:
        """Return lines that were not computed. Those that are no longer ours stay where they are."""
        for part in _parts(list(taken)):
            words = [
                value
                for each in part
                for value in (*self._lease(each), each.attempt - (not attempt_counts))
            ]
            await self._link.call(scripts.GIVE_BACK, *words)

    async def commit(self, commits: Sequence[Commit]) -> set[int]:
        """Record results of one batch. Return the lines whose result counts; others had one.

        A result of a line that is no longer ours is not recorded: whoever took it records one. The
        same commit may be repeated, for example after QueueDown.

        Raises:
            ValueError: the results are of several batches.
            QueueDown: Redis refused, or did not answer.
        """
        if len({each.taken.batch.id for each in commits}) > 1:
            raise ValueError("the results of one commit must be of one batch")
        counted: set[int] = set()
        try:
            for part in _parts(commits):
                counted |= await self._commit(part)
        except QueueDown:
            self._metrics.refused.labels("down").inc(len(commits) - len(counted))
            raise
        return counted

    async def counts(self, record: BatchRecord) -> Counts | None:
        """Return the progress; None if the queue does not know the batch, or not all of its lines.

        Then `add` queues what is missing.
        """
        answer = await self._link.call(scripts.COUNTS, record.id)
        return Counts(*map(as_number, answer[1:])) if len(answer) > 1 else None

    async def outstanding(self, record: BatchRecord) -> int | None:
        """Return the lines without a result; None as `counts` does."""
        counts = await self.counts(record)
        return None if counts is None else counts.total - counts.completed - counts.failed

    async def remove(self, record: BatchRecord) -> int:
        """Forget a batch, with its leases. Return how many it had: lines that run."""
        answer = await self._link.call(scripts.REMOVE, record.id)
        self._records.pop(record.id, None)
        return as_number(answer[1])

    async def leads(self, what: str) -> bool:
        """Take or renew a lease of 30 s for a task that one process does."""
        lead_ms = int(self._timing.lead_s * 1000)
        answer = await self._link.call(scripts.LEAD, what, self._process, lead_ms)
        return answer[1] == 1

    async def resign(self, what: str) -> None:
        """Give the lease of a task back, so that another process need not wait for its end."""
        await self._link.call(scripts.RESIGN, what, self._process)

    async def check(self) -> None:
        """Look at once for a reset, and for leases that ran out. `run` does it once a second."""
        await self._link.check()

    async def _take(self, *arguments: str | int) -> list[Taken]:
        answer = self._link.send(scripts.TAKE, *arguments)
        try:
            taken = await self._read(await asyncio.shield(answer))
        except asyncio.CancelledError:
            # Nobody waits any more. What the server takes for us goes back.
            answer.add_done_callback(self._return)
            raise
        self._metrics.taken.inc(len(taken))
        return taken

    def _return(self, answer: asyncio.Future[Answer]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            task = asyncio.create_task(self._give_back_unread(answer.result()))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _give_back_unread(self, answer: Answer) -> None:
        try:
            await self.give_back(await self._read(answer), attempt_counts=False)
        except QueueDown as error:
            log.info("lines that nobody waits for run out of their leases", reason=str(error))

    async def _read(self, answer: Answer) -> list[Taken]:
        taken: list[Taken] = []
        for block in map(as_list, answer[2:]):
            record = await self._record(as_text(block[0]))
            if record is not None:
                taken += taken_of(record, block, as_number(answer[1]))
        return taken

    async def _record(self, name: str) -> BatchRecord | None:
        """Return the record of a batch that has lines; None if it was removed meanwhile."""
        found = self._records.get(name)
        if found is None:
            answer = await self._link.call(scripts.RECORD, name)
            if len(answer) < 2:
                return None
            try:
                found = self._records[name] = record_of(as_text(answer[1]))
            except (ValueError, TypeError):
                # Another version wrote it. The leases of its lines run out, and it ends by its window.
                batch_metrics.DEFECTS.labels("record").inc()
                log.exception("the record of a batch in Redis cannot be read", batch=name)
                return None
            if len(self._records) > RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(name)
        return found

    async def _commit(self, commits: Sequence[Commit]) -> set[int]:
        words: list[str | int] = []
        for each in commits:
            _, entry, lease = self._lease(each.taken)
            value = f"{each.segment}:{each.offset}"
            counter = "completed" if each.ok else "failed"
            words += (entry, lease, each.taken.line.number, value, counter)
        answer = await self._link.call(scripts.COMMIT, commits[0].taken.batch.id, *words)
        counted: set[int] = set()
        for each, outcome in zip(commits, answer[1:], strict=True):
            if outcome == b"counted":
                counted.add(each.taken.line.number)
            else:
                self._metrics.refused.labels(self._reason(each.taken, as_text(outcome))).inc()
        self._metrics.committed.inc(len(counted))
        return counted

    def _reason(self, taken: Taken, outcome: str) -> str:
        early = taken.fence <= fence_base(self._link.epoch)
        return "epoch" if outcome == "lease" and early else outcome

    def _lease(self, taken: Taken) -> tuple[str, str, int]:
        """Return batch, entry and lease as the scripts take them."""
        return (
            taken.batch.id,
            taken.entry,
            lease_of(taken.fence, self._link.epoch, taken.attempt),
        )


def _parts(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[start : start + PART] for start in range(0, len(items), PART))
