"""Memory words that a benchmark shares with the processes of the engine it measures."""

from __future__ import annotations

import mmap
from pathlib import Path


def shared_words(file: Path) -> memoryview:
    """Return a page of zeroed unsigned 64-bit words in `file`, shared by all who map it."""
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")
