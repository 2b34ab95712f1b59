"""Two engines on one machine that run in turn, a fraction of a second each: what else the machine does meets both.

A shared host is now faster and now slower, for seconds and minutes at a time, by more than what is
to be measured. One engine is halted (SIGSTOP) while the other runs (SIGCONT), and each has a clock of
its own that stands while it is halted. Its clients keep their requests; they notice nothing but
a longer wait, which the clock does not count.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

SHORTEST_S = 0.15
LONGEST_S = 0.35
"""Several steps of an engine, and far less than what the host's moods last; uneven, to fall in with none of them."""


class Turns:
    """The clocks of process groups of which only one runs at any time."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._ran_s = [0.0] * len(self._groups)
        self._running: int | None = None
        self._since = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def end(self) -> None:
        """Lets the turn that runs be the last one."""
        self._over.set()

    def clock(self, engine: int) -> float:
        """Seconds that an engine has run since turns began."""
        with self._lock:
            running = self._running == engine
            return self._ran_s[engine] + (time.perf_counter() - self._since if running else 0.0)

    def alternate(self) -> None:
        """Halts and continues the groups in turn until it is ended."""
        lengths = random.Random(1)
        while not self._over.is_set():
            length_s = lengths.uniform(SHORTEST_S, LONGEST_S)
            for engine in range(len(self._groups)):
                self._continue(engine)
                self._over.wait(length_s)
                self._halt(engine)

    def _continue(self, engine: int) -> None:
        with self._lock:
            self._running, self._since = engine, time.perf_counter()
            _send(self._groups[engine], signal.SIGCONT)

    def _halt(self, engine: int) -> None:
        with self._lock:
            _send(self._groups[engine], signal.SIGSTOP)
            self._ran_s[engine] += time.perf_counter() - self._since
            self._running = None


@contextmanager
def taking_turns(groups: Sequence[int]) -> Iterator[Turns]:
    """Process groups (their ids; all of their processes ours) run in turn in here, and all at once afterwards."""
    turns = Turns(groups)
    thread = threading.Thread(target=turns.alternate, name="turns")
    for group in groups:
        _send(group, signal.SIGSTOP)
    try:
        thread.start()
        yield turns
    finally:
        turns.end()
        thread.join()
        for group in groups:
            _send(group, signal.SIGCONT)


def _send(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # an ended measurement ends its engines first
        os.killpg(group, number)
