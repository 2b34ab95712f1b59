"""Places: the concurrent lines of a pod, shared by its processes and keys.

Each process writes its own row of a table in shared memory, and reads all rows. There are no locks: two
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
"""Maximum keys with lines in a process: its own key, and earlier keys whose last lines still run."""
_FIELDS: Final = 3
"""Fields of a slot: the key, its running lines, and its lines that could be sent."""
_WIDTH: Final = 1 + _FIELDS * SLOTS
"""Fields of a process: the key that it serves, then its slots."""
_RESERVE: Final = 8
"""One of this many places is reserved for keys that hold few."""


def create_rows(processes: int) -> Rows:
    """Create the table of this number of processes, which they get at their start."""
    return multiprocessing.RawArray(c_uint64, processes * _WIDTH)


@lru_cache(maxsize=4096)
def _number(key: str) -> int:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class Places:
    """The places of a pod, as seen by one of its processes."""

    def __init__(self, rows: Rows, index: int, total: int) -> None:
        """Use a table of `create_rows`.

        The process with this index, from 0, writes its own row only. `total`: the places of the pod.
        """
        self._view = memoryview(rows).cast("B").cast("Q")
        self._processes = len(self._view) // _WIDTH
        self._index = index
        self._first = index * _WIDTH
        self.total = total
        self._slots: dict[str, int] = {}
        self._free = list(range(self._first + 1, self._first + _WIDTH, _FIELDS))

    def clear(self) -> None:
        """Clear the row of this process, at its start or after its end."""
        self._view[self._first : self._first + _WIDTH] = memoryview(bytes(8 * _WIDTH)).cast("Q")

    @property
    def running(self) -> int:
        """Return the running lines of all processes."""
        return sum(running for _, running, _ in self._table())

    # -- this process -----------------------------------------------------------------------------

    def serve(self, key: str | None) -> None:
        """Note the key that this process serves."""
        self._view[self._first] = 0 if key is None else _number(key)

    def start(self, key: str) -> None:
        """Note the start of a line."""
        self._view[self._slot(key) + 1] += 1

    def end(self, key: str) -> None:
        """Note the end of a running line."""
        self._view[self._slots[key] + 1] -= 1
        self._release(key)

    def ready(self, lines: Mapping[str, int]) -> None:
        """Note the number of lines of each key that could be sent with free places."""
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

    # -- shares -----------------------------------------------------------------------------------

    def room(self, key: str) -> int:
        """Return the number of further lines of a key that may run.

        A key may have an equal share of all places among the keys with lines to send. Of the last eighth it
        may hold at most as many as remain free, so a key that holds most other places gets none of them.
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
        # A key without places gets one place even if there are more keys than places.
        return max(0, min(max(unreserved, reserved), max(1, share) - own))

    def choose_home(self, waiting: Mapping[str, int]) -> str | None:
        """Return the key that this process should serve; None if it should serve no key now.

        It is the key that the fewest other processes serve, and among these the key with the fewest lines.
        Two processes (of two, one) are reserved for keys that no process serves. A process stays with its
        key, except for a key with fewer lines that no process serves, if all other processes serve a key.

        Args:
            waiting: keys with chunks that this process could take, each with its running lines on all pods.
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
        """Return the keys that other processes serve."""
        homes = self._view[::_WIDTH].tolist()
        return [key for place, key in enumerate(homes) if key and place != self._index]

    def _table(self) -> list[tuple[int, int, int]]:
        """Return each slot in use: its key, running lines, and lines that could be sent."""
        found = []
        for first in range(1, len(self._view), _WIDTH):
            cells = self._view[first : first + _WIDTH - 1].tolist()
            found += [
                cell for cell in zip(cells[::3], cells[1::3], cells[2::3], strict=True) if cell[0]
            ]
        return found
