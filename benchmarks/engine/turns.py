"""Engines on one machine that run in turn, so that other activity affects all alike.

The speed of a shared host varies for seconds and minutes at a time, by more than the measured
difference. All engines but one are halted (SIGSTOP) while it runs (SIGCONT) for a fraction of a
second, and each has a clock of its own that stops while it is halted. Its clients keep their
requests; they only see a longer wait, which the clock does not count.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import NamedTuple

MIN_TURN_S = 0.15
MAX_TURN_S = 0.35
"""Several steps of an engine, much shorter than the host's fluctuations, and of random length."""


class Turn(NamedTuple):
    """The work of an engine in one turn."""

    seconds: float
    tokens: int


class Turns:
    """The clocks of process groups of which only one runs at any time.

    `cycles` holds the work of each engine in its turn, per cycle: these ran under the same
    conditions.
    """

    def __init__(self, groups: Sequence[int], tokens: Callable[[int], int]) -> None:
        self._groups = tuple(groups)
        self._tokens = tokens
        self.cycles: list[list[Turn]] = []
        self._ran_s = [0.0] * len(self._groups)
        self._running: int | None = None
        self._since = 0.0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def end(self) -> None:
        """Make the running turn the last one."""
        self._over.set()

    def clock(self, engine: int) -> float:
        """Return the seconds that an engine has run since the turns began."""
        with self._lock:
            running = self._running == engine
            return self._ran_s[engine] + (time.perf_counter() - self._since if running else 0.0)

    def alternate(self) -> None:
        """Halt and continue the groups in turn until `end` is called."""
        dice = random.Random(1)
        seen = [self._tokens(engine) for engine in range(len(self._groups))]
        while not self._over.is_set():
            length_s = dice.uniform(MIN_TURN_S, MAX_TURN_S)
            cycle: list[Turn] = [Turn(0.0, 0)] * len(self._groups)
            for engine in dice.sample(range(len(self._groups)), len(self._groups)):
                self._continue(engine)
                self._over.wait(length_s)
                ran_s = self._halt(engine)
                tokens = self._tokens(engine)
                cycle[engine] = Turn(ran_s, tokens - seen[engine])
                seen[engine] = tokens
            if not self._over.is_set():
                self.cycles.append(cycle)

    def _continue(self, engine: int) -> None:
        with self._lock:
            self._running, self._since = engine, time.perf_counter()
            _send(self._groups[engine], signal.SIGCONT)

    def _halt(self, engine: int) -> float:
        with self._lock:
            _send(self._groups[engine], signal.SIGSTOP)
            ran_s = time.perf_counter() - self._since
            self._ran_s[engine] += ran_s
            self._running = None
        return ran_s


def ratio_of(cycles: Sequence[Sequence[Turn]], engine: int, against: Sequence[int]) -> float:
    """Return an engine's token rate relative to the mean of others: the middle half of all cycles.

    A cycle's value is 2 (a - b) / (a + b), which lies between -2 and 2 whatever happens in a turn.
    A host that stands still for a turn changes the mean over all cycles by hundredths, and the
    middle half not at all.

    Raises:
        ValueError: no cycle has tokens.
    """
    words = []
    for cycle in cycles:
        rates = [tokens / seconds for seconds, tokens in cycle]
        own, other = rates[engine], fmean(rates[number] for number in against)
        if own + other > 0.0:
            words.append(2.0 * (own - other) / (own + other))
    if not words:
        raise ValueError(f"no tokens in {len(cycles)} cycles")
    words.sort()
    cut = len(words) // 4
    middle = fmean(words[cut : len(words) - cut])
    return (2.0 + middle) / (2.0 - middle)


@contextmanager
def taking_turns(groups: Sequence[int], tokens: Callable[[int], int]) -> Iterator[Turns]:
    """Run process groups (given by their ids) in turn inside the block, and all at once afterwards.

    `tokens` returns the number of tokens that an engine (its index in the sequence) has generated
    so far.
    """
    turns = Turns(groups, tokens)
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
    with suppress(ProcessLookupError):  # a terminated measurement stops its engines first
        os.killpg(group, number)
