"""Words of memory that a benchmark shares with the processes of the engine it measures."""

from __future__ import annotations

import mmap
from pathlib import Path


def shared_words(file: Path) -> memoryview:
    """A page of unsigned 64-bit words, all 0, in `file`: what one process stores there all see."""
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")
