"""The state of a chunk that this process holds: lines that may be sent, and results to write."""

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
"""Maximum time of a result in memory only."""
AGAIN_S: Final = 2.0
"""Pause of a line after its first counted attempt. Each further pause is four times as long, so five attempts
take almost three minutes: an engine that answers 500 until it is replaced fails no line."""


class ChunkRun:
    """The lines of a chunk, from taking it to writing its last part.

    Lines without an attempt are sent first, in order, then failed lines, each after a pause. A line whose
    answer may have ended a process is sent last, alone, after all other results are written.
    """

    def __init__(self, held: Held, log: Log, refs: Mapping[int, LineRef], route: str) -> None:
        """Take the chunk. Call `load` before all other methods."""
        self.held = held
        self.log = log
        self.route = route
        self.key = held.batch.key_id
        self._refs = refs
        self._pending: list[int] = []
        """Heap of the waiting lines without a counted attempt."""
        self._again: dict[int, float] = {}
        """The other waiting lines, and the time from which each may be sent."""
        self._results: dict[int, Result] = {}
        self._failed: Counter[int] = Counter()
        """Unwritten attempts by line."""
        self._since = math.inf
        """Time of the oldest unwritten result."""
        self.running: dict[int, asyncio.Task[Result | GivenBack]] = {}
        """Tasks of the running lines."""
        self.is_writing = False
        """True while a part of the log is being written."""
        self.is_failing = False
        """True while writing fails."""
        self.bytes = 0
        """Bytes of the unwritten results."""
        self.is_ending = False
        """True once no further line is sent."""

    async def load(self) -> None:
        """Read the log.

        Raises:
            StorageError: if it cannot be read now.
        """
        await self.log.read()
        self._sort()

    def _sort(self) -> None:
        """Sort the lines without a result again: others may have written results, or a damaged part lost some."""
        known = self.log.done | self._results.keys() | self.running.keys()
        left = [line for line in self._refs if line not in known]
        again = [line for line in left if self.tried(line).any]
        self._again = {line: self._again.get(line, -math.inf) for line in again}
        self._pending = [line for line in left if line not in self._again]

    # -- lines ------------------------------------------------------------------------------------

    def tried(self, line: int) -> Tried:
        """Return the counted attempts of a line."""
        failed = self.log.troubles(line, Trouble.FAILED) + self._failed[line]
        return Tried(failed, self.log.troubles(line, Trouble.KILLED))

    def waiting(self, now: float) -> int:
        """Return the number of lines that could be sent now."""
        if self.is_ending or self.log.closed:
            return 0
        if self._pending:
            return len(self._pending)
        # While parts are written, attempts in them may count twice.
        return 0 if self.is_writing else len(self._due(now))

    def _due(self, now: float) -> list[int]:
        """Return the lines with attempts that may be sent after all lines without."""
        due = [line for line, at in self._again.items() if at <= now]
        suspects = [line for line in due if self.tried(line).killed]
        if len(suspects) < len(due):
            return [line for line in due if line not in suspects]
        return [] if self.running or self._results else suspects[:1]

    def next(self, now: float) -> LineRef:
        """Return the next waiting line. It counts as running from then on."""
        if self._pending:
            return self._refs[heapq.heappop(self._pending)]
        line = self._due(now)[0]
        del self._again[line]
        return self._refs[line]

    def wakes(self, now: float) -> float:
        """Return the time at which the chunk must be checked again without an event."""
        dues = self._again.values() if not (self._pending or self.is_ending) else ()
        return min((at for at in dues if at > now), default=self._since + PART_S)

    def ended(self, line: int, outcome: Result | GivenBack, now: float) -> None:
        """Note the end of an attempt at a running line."""
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
        """Cancel the running lines."""
        for task in self.running.values():
            task.cancel()

    # -- parts ------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Return whether there are unwritten results or attempts."""
        return bool(self._results or self._failed)

    @property
    def is_complete(self) -> bool:
        """Return whether each line has a result."""
        left = self._pending or self._again or self.running.keys() - self.log.done
        return self.log.closed or not left

    @property
    def is_over(self) -> bool:
        """Return whether this process has nothing left to do for the chunk."""
        return self.is_ending and not self.running

    def part_is_due(self, now: float) -> bool:
        """Return whether a part must be written now."""
        if self.is_complete or self.bytes >= MAX_PART_BYTES or now >= self._since + PART_S:
            return True
        # If the line ends this process, no result must be lost.
        is_left_alone = bool(self._results) and not (self._pending or self.running)
        return is_left_alone and any(self.tried(line).killed for line in self._again)

    async def write(self, now: float) -> None:
        """Write the unwritten results and attempts, and close the log if each line has a result.

        Raises:
            StorageError: if the store fails. Nothing is dropped then.
        """
        results, failed = list(self._results.values()), Counter(self._failed)
        attempts = [Attempt(line, Trouble.FAILED) for line in failed.elements()]
        counted = await self.log.append(results, attempts, close=self.is_complete)
        metrics.DUPLICATES.inc(sum(result.line not in counted for result in results))
        for result in results:
            del self._results[result.line]
            self.bytes -= len(result.text)
        self._failed -= failed
        self._since = now if self._results else math.inf
        self._sort()
