"""One chunk that this process holds: which of its lines may be sent, and what is written."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Mapping
from typing import Final

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import Held, Log
from fleetkeeper_gateway.batch.model import (
    MAX_PART_BYTES,
    Attempt,
    LineRef,
    Result,
    Trouble,
)
from fleetkeeper_gateway.batch.workers.attempt import GivenBack, Tried

PART_S: Final = 30.0
"""Longest time of a result in memory alone."""
AGAIN_S: Final = 2.0
"""Pause of a line after its first attempt that counts. Each further one is four times as long, so five
attempts take almost three minutes: an engine that answers 500 until it is replaced costs no line."""


class ChunkRun:
    """The lines of a chunk, from its taking to its last part.

    First attempts go in order, then those that failed, each after a pause. A line whose answer may have
    ended a process goes last, alone, and when all other results are written.
    """

    def __init__(self, held: Held, log: Log, refs: Mapping[int, LineRef], route: str) -> None:
        """Describe the chunk. Call `load` before anything else."""
        self.held = held
        self.log = log
        self.route = route
        self.key = held.batch.key_id
        self._refs = refs
        self._pending: list[int] = []
        """A heap of lines without an attempt that counts."""
        self._again: dict[int, float] = {}
        """The other ones, and when they may be sent."""
        self._results: dict[int, Result] = {}
        self._failed: Counter[int] = Counter()
        """Attempts that are not written, by line."""
        self._since = math.inf
        """When the oldest result came that is not written."""
        self.running: dict[int, asyncio.Task[Result | GivenBack]] = {}
        """Lines that run."""
        self.is_writing = False
        """Whether a part of the log is being written."""
        self.is_failing = False
        """Whether nothing can be written now."""
        self.bytes = 0
        """Of results that are not written."""
        self.is_ending = False
        """Whether no line is sent any more."""

    async def load(self) -> None:
        """Read the log.

        Raises:
            StorageError: if it cannot be read now.
        """
        await self.log.read()
        self._sort()

    def _sort(self) -> None:
        """Sort the lines without a result: others may have written some, or a damaged part lost some."""
        known = self.log.done | self._results.keys() | self.running.keys()
        left = [line for line in self._refs if line not in known]
        again = [line for line in left if self.tried(line).any]
        self._again = {line: self._again.get(line, -math.inf) for line in again}
        self._pending = [line for line in left if line not in self._again]

    # -- lines ------------------------------------------------------------------------------------

    def tried(self, line: int) -> Tried:
        """Return the attempts of a line that count."""
        failed = self.log.troubles(line, Trouble.FAILED) + self._failed[line]
        return Tried(failed, self.log.troubles(line, Trouble.KILLED))

    def waiting(self, now: float) -> int:
        """Return how many lines could be sent now."""
        if self.is_ending or self.log.closed:
            return 0
        if self._pending:
            return len(self._pending)
        # While parts are written, attempts in them may count twice.
        return 0 if self.is_writing else len(self._due(now))

    def _due(self, now: float) -> list[int]:
        """Return the lines with attempts that may be sent once all others were."""
        due = [line for line, at in self._again.items() if at <= now]
        suspects = [line for line in due if self.tried(line).killed]
        if len(suspects) < len(due):
            return [line for line in due if line not in suspects]
        return [] if self.running or self._results else suspects[:1]

    def next(self, now: float) -> LineRef:
        """Return the next line of those that wait. From now on it runs."""
        if self._pending:
            return self._refs[heapq.heappop(self._pending)]
        line = self._due(now)[0]
        del self._again[line]
        return self._refs[line]

    def wakes(self, now: float) -> float:
        """Return when the chunk needs attention without an event."""
        dues = self._again.values() if not (self._pending or self.is_ending) else ()
        return min((at for at in dues if at > now), default=self._since + PART_S)

    def ended(self, line: int, outcome: Result | GivenBack, now: float) -> None:
        """Note how an attempt at a line that ran ended."""
        del self.running[line]
        if isinstance(outcome, Result):
            self._results[line] = outcome
            self.bytes += len(outcome.text)
            self._since = min(self._since, now)
        elif outcome.attempt_counts:
            self._failed[line] += 1
            self._again[line] = now + AGAIN_S * 4.0 ** (self.tried(line).failed - 1)
        elif self.tried(line).any:
            self._again[line] = -math.inf
        else:
            heapq.heappush(self._pending, line)

    def cancel(self) -> None:
        """End the lines that run."""
        for task in self.running.values():
            task.cancel()

    # -- parts ------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Return whether results or attempts are not written."""
        return bool(self._results or self._failed)

    @property
    def is_complete(self) -> bool:
        """Return whether no line needs a result any more."""
        left = self._pending or self._again or self.running.keys() - self.log.done
        return self.log.closed or not left

    @property
    def is_over(self) -> bool:
        """Return whether nothing more will come of it here."""
        return self.is_ending and not self.running

    def part_is_due(self, now: float) -> bool:
        """Return whether a part should be written now."""
        if self.is_complete or self.bytes >= MAX_PART_BYTES or now >= self._since + PART_S:
            return True
        # A line that may end this process should take no result with it.
        is_left_alone = bool(self._results) and not (self._pending or self.running)
        return is_left_alone and any(self.tried(line).killed for line in self._again)

    async def write(self, now: float) -> None:
        """Write what is not written, and close the log if each line has a result.

        Raises:
            StorageError: if the store fails. What is here stays.
        """
        results, failed = list(self._results.values()), Counter(self._failed)
        attempts = [Attempt(line, Trouble.FAILED) for line in failed.elements()]
        counted = await self.log.append(results, attempts, close=self.is_complete)
        metrics.DUPLICATES.inc(sum(one.line not in counted for one in results))
        for one in results:
            del self._results[one.line]
            self.bytes -= len(one.text)
        self._failed -= failed
        self._since = now if self._results else math.inf
        self._sort()
