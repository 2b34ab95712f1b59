"""The process that writes usage ends at any moment, and goes on with the same files."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.gateway.usage_ledgers import (
    NOW,
    Ledger,
    an_entry,
    assert_complete,
    ends_of_groups,
    fill,
    opened,
    some_ledgers,
    whole,
)
from tests.support.lanes import examples, keep_first

HOUR = 3600.0


class Crash(BaseException):
    """The end of the process."""


class CrashingOs:
    """The calls with which the store changes files. One of them is the last of its process."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int, share: float) -> None:
        self.calls = 0
        self._last = last
        self._share = share
        write = os.write
        patch.setattr(os, "write", self._dying(write, cut=self._cut_write(write)))
        patch.setattr(os, "fsync", self._dying(os.fsync))
        patch.setattr(os, "ftruncate", self._dying(os.ftruncate))
        patch.setattr(Path, "replace", self._dying(Path.replace))
        patch.setattr(Path, "unlink", self._dying(Path.unlink))

    def _cut_write(self, write: Callable[..., int]) -> Callable[..., int]:
        return lambda file, data: write(file, data[: int(len(data) * self._share)])

    def _dying(
        self, real: Callable[..., Any], cut: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls == self._last:
                if cut is not None:
                    cut(*args, **more)
                elif self._share == 1.0:
                    real(*args, **more)
                raise Crash
            if self.calls > self._last:
                raise Crash  # nothing happens after the end
            return real(*args, **more)

        return call


def one_life(directory: Path, first: Ledger, second: Ledger, begin: int) -> int:
    """Hours go by: read, sync, tidy. Returns the rounds that were begun."""
    store = opened(directory, NOW + begin * HOUR)
    for number in itertools.count(begin):
        now = NOW + number * HOUR + 1.0
        if number == 6:
            store.close()
            return number
        if len(first.entries) < 5 * (number + 1):
            fill(first, second, now, number)
        for ledger in (first, second):
            ledger.read_into(store, now)
        store.sync()
        store.tidy(now)
    raise AssertionError


def lives(directory: Path, patch: pytest.MonkeyPatch, last: int, share: float) -> bool:
    """One life that ends at a call, and one more. Returns whether the first did end."""
    first, second = some_ledgers()
    ended = False
    with patch.context() as inside:
        CrashingOs(inside, last, share)
        try:
            one_life(directory, first, second, 0)
        except Crash:
            ended = True
    begin = max(0, len(first.entries) // 5 - 1)
    if ended:
        one_life(directory, first, second, begin)
    store = opened(directory, NOW + 7 * HOUR)
    report = whole(store, "key")
    store.close()
    assert_complete(report, first, second)
    # The four of pod-1, two of pod-2, and one of the two that are the same.
    assert report.rows["key-1",].requests == 6 * 7
    assert report.lost.requests == 0
    return ended


@pytest.mark.parametrize(
    "share", keep_first(1, [0.5, 0.0, 0.01, 0.99, 1.0], pytest.mark.exhaustive)
)
def test_a_crash_at_any_write_counts_nothing_twice_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The process ends at each of its writes, renames, deletions in turn: before, amid, or after it."""
    for last in itertools.count(1):
        directory = tmp_path / str(last)
        if not lives(directory, monkeypatch, last, share):
            break
        shutil.rmtree(directory)
    assert last > 40


class Collecting(RuleBasedStateMachine):
    """Entries, readings, restarts, crashes and hours in any order."""

    directory: Path
    numbers: Iterator[int]

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fleetkeeper-usage-"))
        self.now = NOW
        self.ledgers = [Ledger(f"pod-{index}", 6, 2) for index in range(3)]
        self.numbers = itertools.count()
        self.store = opened(self.directory, self.now)

    @rule(pod=st.integers(0, 2), count=st.integers(1, 9), granted=st.booleans())
    def work(self, pod: int, count: int, granted: bool) -> None:
        for _ in range(count):
            name = f"a-{next(self.numbers)}" if granted else None
            self.ledgers[pod].add(an_entry(name, self.now, next(self.numbers) % 50))

    @rule(name=st.integers(0, 40), pods=st.lists(st.integers(0, 2), min_size=2, max_size=3))
    def resend(self, name: int, pods: list[int]) -> None:
        for pod in pods:
            self.ledgers[pod].add(an_entry(f"again-{name}", self.now, 3))

    @rule(pod=st.integers(0, 2))
    def read(self, pod: int) -> None:
        self.ledgers[pod].read_into(self.store, self.now)

    @rule(seconds=st.integers(1, 9000))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def tidy(self) -> None:
        self.store.tidy(self.now)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = opened(self.directory, self.now)

    @precondition(lambda self: any(self.directory.iterdir()))
    @rule(cut=st.integers(1, 400))
    def crash(self, cut: int) -> None:
        """The last write of the process was not whole: what it was to add is read again."""
        newest = max(self.directory.glob("*.jsonl"))
        size = newest.stat().st_size
        groups = ends_of_groups(newest)
        start = groups[-2] if len(groups) > 1 else 0
        self.store.close()
        os.truncate(newest, max(start, size - cut))
        self.store = opened(self.directory, self.now)

    @invariant()
    def every_entry_counts_once(self) -> None:
        for ledger in self.ledgers:
            ledger.read_into(self.store, self.now)
        assert_complete(whole(self.store), *self.ledgers)
        attributed = sum(row.requests for row in whole(self.store).rows.values())
        names = {e["attempt"] for ledger in self.ledgers for e in ledger.entries} - {None}
        assert attributed <= len(names)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.directory)


TestCollecting = Collecting.TestCase
TestCollecting.settings = settings(examples(40), stateful_step_count=25)
