"""The line whose answer a worker process handles, in memory that it shares with its parent.

If the process ends meanwhile, the parent knows which line ended it.
"""

from __future__ import annotations

import multiprocessing
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Array, c_char
from typing import Final

_SLOT: Final = struct.Struct("<38sI")
_FILLED: Final = _SLOT.size
"""Place of the byte that says whether there is a line: written last, and cleared first."""

Memory = Array[c_char]


def create_memory() -> Memory:
    """Return the memory of one process, to hand to it when it starts."""
    return multiprocessing.RawArray(c_char, _SLOT.size + 1)


class Handling:
    """The slot of one process."""

    def __init__(self, memory: Memory) -> None:
        self._view = memoryview(memory).cast("B")

    @contextmanager
    def __call__(self, batch_id: str, line: int) -> Iterator[None]:
        """Name the line whose answer is handled meanwhile. No other may be handled before it ends."""
        _SLOT.pack_into(self._view, 0, batch_id.encode(), line)
        self._view[_FILLED] = 1
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Name no line."""
        self._view[_FILLED] = 0

    def read(self) -> tuple[str, int] | None:
        """Return batch and number of the line; None if no answer is handled."""
        if not self._view[_FILLED]:
            return None
        batch_id, line = _SLOT.unpack_from(self._view)
        return batch_id.rstrip(b"\0").decode(), line
