"""Memory of the supervisor itself: frees after the start what only the start needed.

Every engine pod pays for its supervisor. A third of its memory is libraries' text, most of it run
once, by imports. Dropping it costs a few hundred page faults without I/O: the pages stay in the
page cache, because vLLM's own processes use the same libraries.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s*(.*)$")
_SMAPS = Path("/proc/self/smaps")


class Span(NamedTuple):
    """A range of addresses."""

    start: int
    length: int


def unwritten_spans(smaps: Iterable[str]) -> Iterator[Span]:
    """Yield the file mappings that can be dropped without loss: read only, without anonymous pages.

    A page that was written while the program was linked is private to this process, and dropping it
    would lose its contents.
    """
    span: Span | None = None
    for line in smaps:
        head = _HEAD.match(line)
        if head is not None:
            start, end = int(head[1], 16), int(head[2], 16)
            of_file = int(head[4]) > 0 and "w" not in head[3]
            span = Span(start, end - start) if of_file else None
        elif span is not None and line.startswith("Anonymous:"):
            if int(line.split()[1]) == 0:
                yield span
            span = None


def trim_memory() -> None:
    """Return free heap and unneeded library pages to the kernel. Takes some milliseconds."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    try:
        spans = list(unwritten_spans(_SMAPS.read_text().splitlines()))
    except OSError:
        return  # a sandbox without /proc: nothing to trim
    for span in spans:
        libc.madvise(ctypes.c_void_p(span.start), ctypes.c_size_t(span.length), mmap.MADV_DONTNEED)
