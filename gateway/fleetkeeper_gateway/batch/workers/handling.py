"""The line whose answer a worker process is handling, in memory that it shares with its parent.

If the process ends meanwhile, the parent knows the line that ended it.
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
"""Offset of the byte that marks the slot as filled: written last, and cleared first."""

Memory = Array[c_char]


def create_memory() -> Memory:
    """Create the shared memory of one process, which it gets at its start."""
    return multiprocessing.RawArray(c_char, _SLOT.size + 1)


class Handling:
    """The slot of one process."""

    def __init__(self, memory: Memory) -> None:
        self._view = memoryview(memory).cast("B")

    @contextmanager
    def __call__(self, batch_id: str, line: int) -> Iterator[None]:
        """Name the line whose answer the block handles. Only one answer may be handled at a time."""
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
        """Return the batch and the number of the line; None while no answer is handled."""
        if not self._view[_FILLED]:
            return None
        batch_id, line = _SLOT.unpack_from(self._view)
        return batch_id.rstrip(b"\0").decode(), line
