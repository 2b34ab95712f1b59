"""Places: the lines of a pod that may run at the same time, shared by its processes and their keys.

Each process writes its own rows of a table in shared memory, and reads those of all. Nothing is locked: two
processes that start a line in the same moment may exceed a share by one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import Counter
from collections.abc import Mapping
from ctypes import Array, c_uint64
from functools import lru_cache
from typing import Final

Rows = Array[c_uint64]

SLOTS: Final = 64
"""Keys of which one process may have lines at the same time: its own, and earlier ones whose last lines run."""
_FIELDS: Final = 3
"""Of a slot: the key, its lines that run, and those that could be sent."""
_WIDTH: Final = 1 + _FIELDS * SLOTS
"""Of a process: the key that it serves, then its slots."""
_RESERVE: Final = 8
"""One of so many places is kept for keys that hold few."""


def create_rows(processes: int) -> Rows:
    """Return a table for so many processes, to hand to them when they start."""
    return multiprocessing.RawArray(c_uint64, processes * _WIDTH)


@lru_cache(maxsize=4096)
def _number(key: str) -> int:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class Places:
    """The places of a pod, for one of its processes."""

    def __init__(self, rows: Rows, index: int, total: int) -> None:
        """Use a table of `create_rows`.

        The process with this index, from 0, writes its own rows only. `total` are the places of the pod.
        """
        self._view = memoryview(rows).cast("B").cast("Q")
        self._processes = len(self._view) // _WIDTH
        self._index = index
        self._first = index * _WIDTH
        self.total = total
        self._slots: dict[str, int] = {}
        self._free = list(range(self._first + 1, self._first + _WIDTH, _FIELDS))

    def clear(self) -> None:
        """Empty the rows of this process: it has just begun, or it has ended."""
        self._view[self._first : self._first + _WIDTH] = memoryview(bytes(8 * _WIDTH)).cast("Q")

    @property
    def running(self) -> int:
        """Return the lines of all processes that run."""
        return sum(running for _, running, _ in self._table())

    # -- what this process does -------------------------------------------------------------------

    def serve(self, key: str | None) -> None:
        """Note the key that this process serves."""
        self._view[self._first] = 0 if key is None else _number(key)

    def start(self, key: str) -> None:
        """Note that a line begins to run."""
        self._view[self._slot(key) + 1] += 1

    def end(self, key: str) -> None:
        """Note that a line of those that run ended."""
        self._view[self._slots[key] + 1] -= 1
        self._release(key)

    def ready(self, lines: Mapping[str, int]) -> None:
        """Note how many lines of each key could be sent if there were places."""
        for key in self._slots.keys() | lines.keys():
            if key in self._slots or self._free:
                self._view[self._slot(key) + 2] = lines.get(key, 0)
                self._release(key)

    def _slot(self, key: str) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._free.pop()
            self._view[slot] = _number(key)
        return slot

    def _release(self, key: str) -> None:
        slot = self._slots[key]
        if not self._view[slot + 1] and not self._view[slot + 2]:
            self._view[slot] = 0
            self._free.append(self._slots.pop(key))

    # -- what it may do ---------------------------------------------------------------------------

    def room(self, key: str) -> int:
        """Return how many more lines of a key may run.

        A key may have its part of all places among the keys that have lines to send. Of the last eighth
        it may have as many as it leaves free, so a key that holds most of the others gets none of it.
        """
        if key not in self._slots and not self._free:
            return 0
        number = _number(key)
        total = own = 0
        others = set()
        for other, running, ready in self._table():
            total += running
            if other == number:
                own += running
            elif ready:
                others.add(other)
        free = self.total - total
        unreserved = free - self.total // _RESERVE
        reserved = (free - own + 1) // 2
        share = self.total // (len(others) + 1) if others else self.total
        # A key that holds none gets one place even if there are more keys than places.
        return max(0, min(max(unreserved, reserved), max(1, share) - own))

    def choose_home(self, waiting: Mapping[str, int]) -> str | None:
        """Return the key that this process should serve; None if it should serve none now.

        It is the key that the fewest other processes serve, of those the one with the fewest lines. Two
        processes (one of two) are kept for keys that no process serves. A process stays with its key, but
        for a key with fewer lines that no process serves, if all other processes serve some.

        Args:
            waiting: the keys with chunks that this process could take, with the lines that all pods run.
        """
        served = Counter(self._homes())
        lines: Counter[int] = Counter()
        for number, running, ready in self._table():
            lines[number] += running + ready

        def need(key: str) -> tuple[int, int]:
            number = _number(key)
            return served[number], max(waiting[key], lines[number])

        home = next((key for key in waiting if _number(key) == self._view[self._first]), None)
        kept = min(2, self._processes - 1)
        may_share = served.total() < self._processes - kept
        allowed = [key for key in waiting if may_share or key == home or not need(key)[0]]
        best = min(allowed, key=need, default=None)
        if best is None or home is None:
            return best
        others_are_idle = served.total() < self._processes - 1
        leaves = not others_are_idle and need(best)[0] == 0 and need(best) < need(home)
        return best if leaves else home

    def _homes(self) -> list[int]:
        """Return the keys that the other processes serve."""
        homes = self._view[::_WIDTH].tolist()
        return [key for place, key in enumerate(homes) if key and place != self._index]

    def _table(self) -> list[tuple[int, int, int]]:
        """Return keys with their lines that run and that could be sent, as often as processes have them."""
        found = []
        for first in range(1, len(self._view), _WIDTH):
            cells = self._view[first : first + _WIDTH - 1].tolist()
            found += [
                cell for cell in zip(cells[::3], cells[1::3], cells[2::3], strict=True) if cell[0]
            ]
        return found
