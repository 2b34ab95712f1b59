"""The shared region: a file in /dev/shm that connects supervisor, middleware and scheduler.

Each block has one writer. Readers never wait for a writer, and writers never wait for a reader. A
block that cannot be read consistently is None, and the reader uses its start-up values.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fleetkeeper_engine.shm.codec import (
    HEADER,
    HEARTBEAT_AT,
    MAX_RANKS,
    pack_header,
    places,
    seal,
    slot_size,
    unpack_header,
    unseal,
)
from fleetkeeper_engine.shm.layout import (
    CAP,
    HEARTBEAT,
    LOAD,
    MIDDLEWARE,
    SCHEDULER,
    SUPERVISOR,
    Block,
    CapBlock,
    Cells,
    HeartbeatBlock,
    Layout,
    LoadBlock,
    MiddlewareBlock,
    SchedulerBlock,
    SupervisorBlock,
)

ENVIRONMENT = "FLEETKEEPER_SHARED_MEMORY"
FILE = "shared-memory"
"""The region's name in the run directory."""
"""The environment variable with the path of the shared region, for vLLM's processes."""

_TRIES = 4
_SUPERVISOR, _MIDDLEWARE, _SCHEDULER, _FIRST_RANK = range(4)
_OF_CELLS = {MIDDLEWARE: _MIDDLEWARE, SCHEDULER: _SCHEDULER}


class Region:
    """One mapping of the region. Two threads must not write the same block through it at once."""

    def __init__(self, memory: mmap.mmap, nonce: int, ranks: int) -> None:
        self._memory = memory
        self.nonce = nonce
        self.ranks = ranks
        self._places = places(ranks)
        self._slots = [(place.slot(0), place.slot(1)) for place in self._places]
        self._written: dict[int, int] = {}
        self._words = memoryview(memory).cast("Q")
        even, odd = self._slots[_SUPERVISOR]
        self._supervisor_even, self._supervisor_odd = even >> 3, odd >> 3
        self.heartbeat = Cells(
            HEARTBEAT, memoryview(memory)[HEARTBEAT_AT : HEARTBEAT_AT + HEARTBEAT.size]
        )
        """The scheduler's heartbeat, in the region itself: a store is visible to readers at once."""

    @classmethod
    def create(cls, path: Path | str, nonce: int | None = None, ranks: int = 1) -> Region:
        """Create the region, mode 0600, and map it. Processes of an earlier start keep the old file.

        Raises:
            ValueError: if there are more ranks than the region has room for.
            OSError: if the file cannot be created.
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"shared memory has room for 1 to {MAX_RANKS} ranks, not {ranks}")
        path = Path(path)
        size = places(ranks)[-1].end
        descriptor, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            nonce = secrets.randbits(64) if nonce is None else nonce
            header = pack_header(nonce, ranks)
            memory[: len(header)] = header
            Path(made).replace(path)
        except BaseException:
            Path(made).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return cls(memory, nonce, ranks)

    @classmethod
    def open(cls, path: Path | str) -> Region | None:
        """Map an existing region; None if there is none of this layout version."""
        try:
            with Path(path).open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        known = unpack_header(memory[: HEADER.size])
        if known is None or len(memory) < places(known[1])[-1].end:
            memory.close()
            return None
        return cls(memory, *known)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Region | None:
        """Map the region that the supervisor created for this pod; None if there is none."""
        path = environment.get(ENVIRONMENT)
        return cls.open(path) if path else None

    def close(self) -> None:
        """Unmap the region."""
        self.heartbeat.release()
        self._words.release()
        self._memory.close()

    def read_supervisor(self) -> SupervisorBlock | None:
        """Return the supervisor's block: the limits lease, the policy and the pod's states."""
        return self._read(_SUPERVISOR, SUPERVISOR)

    def read_middleware(self) -> MiddlewareBlock | None:
        """Return the middleware's block: the requests in front of the engine."""
        return self._read(_MIDDLEWARE, MIDDLEWARE)

    def read_scheduler(self) -> SchedulerBlock | None:
        """Return the scheduler's block: the state and counters of the engine."""
        return self._read(_SCHEDULER, SCHEDULER)

    def read_heartbeat(self) -> HeartbeatBlock:
        """Return the heartbeat before the engine's last step; zeros before its first step."""
        calls, steps, tokens, *_ = self.heartbeat.whole
        return HeartbeatBlock(
            calls, steps, tokens, tuple(self.heartbeat.real[HEARTBEAT.cells["oldest_arrival"] :])
        )

    def read_cap(self, rank: int) -> CapBlock | None:
        """Return the memory cap of a worker; None until it reported one."""
        return self._read(_FIRST_RANK + rank, CAP)

    def all_loaded(self) -> float | None:
        """Return when the last rank had loaded its model; None until every rank has."""
        blocks = [self._read(_FIRST_RANK + self.ranks + rank, LOAD) for rank in range(self.ranks)]
        times = [block.loaded for block in blocks if block is not None]
        return max(times) if len(times) == self.ranks else None

    def supervisor_sequence(self) -> int:
        """Return a number that changes with every write of the supervisor's block; cheaper than reading it."""
        words = self._words
        return max(words[self._supervisor_even], words[self._supervisor_odd])

    def caps_armed(self) -> bool:
        """Return whether the allocator of every rank is limited to its cap."""
        caps = [self.read_cap(rank) for rank in range(self.ranks)]
        return all(cap is not None and cap.armed for cap in caps)

    def write_supervisor(self, block: SupervisorBlock) -> None:
        """Write the supervisor's block."""
        self._write(_SUPERVISOR, SUPERVISOR.pack(block))

    def write_middleware(self, block: MiddlewareBlock) -> None:
        """Write the middleware's block."""
        self._write(_MIDDLEWARE, MIDDLEWARE.pack(block))

    def write_scheduler(self, block: SchedulerBlock) -> None:
        """Write the scheduler's block."""
        self._write(_SCHEDULER, SCHEDULER.pack(block))

    def write_heartbeat(self, block: HeartbeatBlock) -> None:
        """Write the heartbeat."""
        self._memory[HEARTBEAT_AT : HEARTBEAT_AT + HEARTBEAT.size] = HEARTBEAT.pack(block)

    def write_cap(self, rank: int, block: CapBlock) -> None:
        """Write the memory cap of a worker.

        Raises:
            ValueError: if the region has no such rank.
        """
        self._write(_FIRST_RANK + self._checked(rank), CAP.pack(block))

    def write_load(self, rank: int, block: LoadBlock) -> None:
        """Write the start of a worker.

        Raises:
            ValueError: if the region has no such rank.
        """
        self._write(_FIRST_RANK + self.ranks + self._checked(rank), LOAD.pack(block))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"shared memory has {self.ranks} ranks; there is no rank {rank}")
        return rank

    def publish(self, cells: Cells) -> None:
        """Write a block that is kept as cells (scheduler or middleware)."""
        self._write(_OF_CELLS[cells.layout], cells.buffer)

    def _sequences(self, number: int) -> tuple[int, int]:
        even, odd = self._slots[number]
        return self._words[even >> 3], self._words[odd >> 3]

    def _write(self, number: int, payload: bytes | memoryview) -> None:
        last = self._written.get(number)
        if last is None:
            # A restarted writer continues the sequence of its predecessor.
            last = max(self._sequences(number))
        sequence = last + 1
        offset = self._slots[number][sequence & 1]
        slot = seal(self.nonce, self._places[number], sequence, payload)
        self._memory[offset : offset + len(slot)] = slot
        self._written[number] = sequence

    def _read(self, number: int, layout: Layout[Block]) -> Block | None:
        payload = self.read_payload(number)
        return None if payload is None else layout.unpack(payload)

    def read_payload(self, number: int) -> bytes | None:
        """Return the bytes of the newest consistent state of a block; None before the first.

        A slot that fails its checksum was being overwritten; by then the other slot is complete.
        """
        place = self._places[number]
        size = slot_size(place.payload)
        for _ in range(_TRIES):
            for sequence in sorted(self._sequences(number), reverse=True):
                offset = self._slots[number][sequence & 1]
                found = unseal(self.nonce, place, self._memory[offset : offset + size])
                if found is not None:
                    return found[1]
        return None
