"""Output that never waits for its reader.

Pid 1 writes its log into a pipe of the container runtime. If nothing reads that pipe, a write
blocks, and with it the event loop that answers probes. The kubelet would then kill a healthy engine
because of its log. So a thread writes from a bounded buffer; output that does not fit is dropped
and counted.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MAX_BYTES: Final = 1024**2
_FLUSH_S: Final = 2.0


class Outlet:
    """One file descriptor. Any thread may call `write`, which never blocks."""

    def __init__(self, descriptor: int, max_bytes: int = MAX_BYTES) -> None:
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        """Bytes that wait, including those that are being written."""
        self._unreported = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Bytes that were not written."""

    def write(self, data: bytes) -> None:
        """Queue data for the descriptor; drop it if too much waits already."""
        with self._changed:
            if self._bytes + len(data) > self._max_bytes:
                self._drop(len(data))
                return
            if self._thread is None:
                # The thread may be blocked in a write when the process ends, so nothing joins it.
                self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
                self._thread.start()
            for item in (self._note(), data):
                self._waiting.append(item)
                self._bytes += len(item)
            self._changed.notify_all()

    def flush(self, within_s: float = _FLUSH_S) -> None:
        """Wait until everything is written, up to a limit in case nothing reads."""
        deadline = time.monotonic() + within_s
        with self._changed:
            while self._bytes and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = self._waiting.popleft()
            written = self._write(data)
            with self._changed:
                self._drop(len(data) - written)
                self._bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> int:
        """Write all of it; return fewer bytes if there is no reader."""
        at = 0
        while at < len(data):
            try:
                at += os.write(self._descriptor, data[at:])
            except OSError:
                break
        return at

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._unreported += count

    def _note(self) -> bytes:
        """Return the message that replaces dropped output."""
        count, self._unreported = self._unreported, 0
        if not count:
            return b""
        return b"[fleetkeeper: %d bytes of output dropped: the log was not read]\n" % count


class _Text(io.TextIOBase):
    """An outlet as a stream for logging."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def write(self, text: str) -> int:
        self._outlet.write(text.encode("utf-8", "backslashreplace"))
        return len(text)


@contextmanager
def logging_through(outlet: Outlet) -> Iterator[None]:
    """Send log records for stderr through an outlet during the context."""
    text = _Text(outlet)
    moved = [
        (handler, handler.setStream(text))
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
    ]
    try:
        yield
    finally:
        outlet.flush()
        for handler, stream in moved:
            # No writer holds the handler's lock, because an outlet never blocks.
            handler.stream = stream
