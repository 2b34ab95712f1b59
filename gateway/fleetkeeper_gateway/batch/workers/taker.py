"""Takes chunks from the queue: decides on the key, the number and the time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.going_on import noted
from fleetkeeper_gateway.batch.interfaces import (
    Batches,
    Held,
    ObjectMissing,
    Queue,
    QueueDown,
    StorageError,
)
from fleetkeeper_gateway.batch.workers.chunk_run import ChunkRun
from fleetkeeper_gateway.batch.workers.holding import Holding
from fleetkeeper_gateway.batch.workers.inputs import Shared
from fleetkeeper_gateway.batch.workers.pace import Paces
from fleetkeeper_gateway.batch.workers.places import Places

log = structlog.get_logger(__name__)

_WAIT_S: Final = 0.5
"""Period in which the queue is asked for chunks again, also for a key that had none."""
UNREAD_S: Final = 5.0
"""Rest of a key whose chunks cannot be read from the store."""
_MAX_CHUNKS: Final = 512
"""Maximum held chunks. A key holds at most as many as remain free."""
_SPARE: Final = 8
"""The next chunk is taken when one of this many lines is left, before the last lines run."""
_MAX_INDEXES: Final = 16
_OVERTAKE_S: Final = 10.0
"""Period of the search for a batch with an earlier deadline than the waiting lines."""


class Taker:
    """Supplies this process with chunks for its places."""

    def __init__(
        self,
        queue: Queue,
        batches: Batches,
        places: Places,
        paces: Paces,
        holding: Holding,
        *,
        route: Callable[[str, str], str],
        monotonic: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._batches = batches
        self._places = places
        self._paces = paces
        self._holding = holding
        self._route = route
        self._monotonic = monotonic
        self._home: str | None = None
        self._empty: dict[str, set[str]] = {}
        """Keys without a chunk to take, each with the flows that were skipped."""
        self._indexes = Shared(batches.index, _MAX_INDEXES)
        self._is_asked = True
        """True if the queue may have chunks for any key."""
        self._overtook = -math.inf
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Take chunks if there are places for their lines now."""
        self._woken.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Take chunks until an event is set, and `wake` was called after it."""
        asking = asyncio.create_task(self._ask_again())
        try:
            while not stopping.is_set():
                self._woken.clear()
                if not await self._took_some():
                    await self._woken.wait()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask_again(self) -> None:
        while True:
            await asyncio.sleep(_WAIT_S)
            self._is_asked = True
            self._empty.clear()
            self._woken.set()

    async def _took_some(self) -> bool:
        """Take chunks if they are needed. Return whether to try again at once."""
        try:
            return await self._take(self._monotonic())
        except QueueDown as error:
            metrics.QUEUE_FAILURES.labels("take").inc()
            log.info("no chunks can be taken", reason=str(error))
        except Exception:
            metrics.DEFECTS.labels("take").inc()
            log.exception("no chunks can be taken")
        self._is_asked = False
        return False

    async def _take(self, now: float) -> bool:
        if not (self._is_asked or (self._home is not None and self._needs(self._home, now))):
            return False
        if self._is_asked and now >= self._overtook + _OVERTAKE_S:
            self._overtook = now
            await self._overtake(now)
        waiting = {
            key: lines for key, lines in (await self._queue.keys()).items() if self._needs(key, now)
        }
        key = self._places.choose_home(waiting)
        if key is not None or not self._holding.of_key(self._home):
            self._home = key
            self._places.serve(key)
        if key is None:
            self._is_asked = False
            return False
        supplied = self._supplied(key, now)
        # One at a time: the capacity of its service is known only once lines run.
        taken = await self._queue.take(key, 1, supplied)
        if not taken:
            self._empty[key] = supplied
            return True
        for held in taken:
            self._holding.held[held] = None
            await self._load(held)
        return True

    async def _overtake(self, now: float) -> None:
        """Take a chunk of this process's key if its deadline is earlier than those of the waiting lines."""
        key = self._home
        waiting = [run for run in self._holding.runs if run.key == key and run.waiting(now)]
        if key is None or not waiting or self._holding.stops(key, now):
            return
        resting = {
            flow for pace in self._paces.all().values() if pace.rests(now) for flow in pace.flows
        }
        before = waiting[0].held.batch.expires
        for held in await self._queue.take(key, 1, resting, before=before):
            self._holding.held[held] = None
            await self._load(held)

    # -- need -------------------------------------------------------------------------------------

    def _needs(self, key: str, now: float) -> bool:
        """Return whether a key needs further lines."""
        if self._holding.stops(key, now):
            return False
        if key in self._empty and self._empty[key] <= self._supplied(key, now):
            return False
        if self._holding.of_key(key) >= _MAX_CHUNKS - len(self._holding.held):
            return False
        waiting, running = self._lines(key, now)
        spare = 1 + running.total() // _SPARE if running else 0
        return waiting.total() < max(self._places.room(key), spare)

    def _lines(self, key: str, now: float) -> tuple[Counter[str], Counter[str]]:
        """Return the lines of a key that could be sent, and its running lines, by route."""
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for run in self._holding.runs:
            if run.key == key:
                running[run.route] += len(run.running)
                if not self._paces.of(run.route).rests(now):
                    waiting[run.route] += run.waiting(now)
        return waiting, running

    def _supplied(self, key: str, now: float) -> set[str]:
        """Return the flows of a key whose further lines would only wait."""
        waiting, running = self._lines(key, now)
        found: set[str] = set()
        for route, pace in self._paces.all().items():
            enough = max(1, pace.free(now)) + running[route] // _SPARE
            if pace.rests(now) or waiting[route] >= enough:
                found |= pace.flows
        return found

    # -- loading ----------------------------------------------------------------------------------

    async def _load(self, held: Held) -> None:
        chunk = held.batch.id, held.chunk
        for run in self._holding.runs:
            if (
                run.held.batch.id,
                run.held.chunk,
            ) == chunk:  # the queue lost that this process holds it
                del self._holding.held[run.held]
                self._holding.held[held], run.held = run, held
                run.is_ending = False
                return
        try:
            run = await self._loaded(held)
        except ObjectMissing as error:
            # Its batch has ended, or is being repaired. The chunk is no longer renewed.
            log.info("a chunk cannot be found", batch=held.batch.id, reason=str(error))
            self._holding.drop(held)
            with noted("chunk", "a batch cannot be removed", batch=held.batch.id):
                if await self._batches.final(held.batch) is not None:
                    await self._queue.remove(held.batch)  # from an older copy of Redis
        except StorageError as error:
            metrics.STORE_FAILURES.labels("chunk").inc()
            log.warning("a chunk cannot be read; its key waits", error=str(error))
            self._holding.rest(held.batch.key_id, self._monotonic() + UNREAD_S)
            await self._holding.let_go([held], self._queue.give_back([held]))
        except Exception:
            metrics.DEFECTS.labels("chunk").inc()
            log.exception("a chunk cannot be read", batch=held.batch.id, chunk=held.chunk)
            self._holding.drop(held)
        else:
            self._holding.add(run)

    async def _loaded(self, held: Held) -> ChunkRun:
        route = self._route(held.batch.key_id, held.model)
        for pace in self._paces.all().values():
            pace.flows.discard(held.flow)
        self._paces.of(route).flows.add(held.flow)
        index = await self._indexes.get(held.batch)
        lines = index.chunks[held.chunk]
        found = self._batches.log(held.batch, held.chunk, lines)
        run = ChunkRun(held, found, {number: index[number] for number in lines}, route)
        await run.load()
        return run
