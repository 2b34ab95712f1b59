"""The rule of a chunk's log holds in every order of calls, with every fault (`log_model`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from fleetkeeper_gateway.batch.model import Attempt, Result, Trouble
from fleetkeeper_gateway.batch.storage import part as parts
from fleetkeeper_gateway.batch.storage.chunk_log import ChunkLog
from fleetkeeper_gateway.batch.storage.paths import DAMAGED
from tests.gateway.batch.storage.log_actors import damage, finalizer, mark, writer
from tests.gateway.batch.storage.log_model import (
    PATH,
    STORE,
    Explorer,
    Notes,
    Script,
    State,
    at_once,
)

FAILED: Final = [Attempt(0, Trouble.FAILED)]
Check = Callable[[State], None]
Objects = dict[str, bytes]


def read(objects: Objects, lines: range) -> tuple[ChunkLog, list[Result]]:
    """Return the log and its results, as a new reader finds them."""
    log = ChunkLog(STORE, PATH, lines)
    at_once(objects, log.read())

    async def results() -> list[Result]:
        return [one async for one in log.results()]

    return log, at_once(objects, results())


def written(objects: Objects) -> list[parts.Part]:
    """Return the parts that count, without the code of a log. None follows a closing one."""
    found = []
    for number in range(sum(not path.endswith(DAMAGED) for path in objects)):
        content = objects[PATH(number)]  # there are no gaps
        if PATH(number) + DAMAGED in objects:
            continue
        found.append(parts.decode(content))
    return found


def check_end(objects: Objects, state: State, lines: range) -> tuple[ChunkLog, list[Result]]:
    """Check what holds in each end: one result a line, and all readers agree."""
    log, results = read(objects, lines)
    again, same = read(objects, lines)
    assert (results, log.closed) == (same, again.closed)
    assert [one.line for one in results] == sorted({one.line for one in results})
    kept = written(objects)
    counted = Counter(line for part in kept for line, _ in part.entries)
    assert set(counted.values()) <= {1}, counted
    assert not any(part.head.closing for part in kept[:-1]), "a part follows the last one"
    assert sum(part.head.closing for part in kept) == log.closed
    for one in state.notes:
        numbers = [each.line for each in one.output or ()]
        assert numbers == sorted(set(numbers))
    return log, results


def check_undamaged(lines: range, attempts: int = 0) -> Check:
    """Return a check: what was said to count counts, and outputs are a function of the closed log."""

    def check(state: State) -> None:
        log, results = check_end(dict(state.objects), state, lines)
        if any(one.closed for one in state.notes):
            assert log.closed
        if log.closed:
            assert [one.line for one in results] == list(lines)
        for one in state.notes:
            assert one.counted <= set(results), "a result that counted is gone"
            assert one.output in (None, tuple(results))
        assert log.troubles(0, Trouble.FAILED) <= attempts, "an attempt counts twice"

    return check


def check_damaged(lines: range) -> Check:
    """Return a check of what holds although a part is damaged at any time."""

    def check(state: State) -> None:
        objects = dict(state.objects)
        check_end(objects, state, lines)
        # Who comes later can close it.
        at_once(objects, finalizer(lines)(Notes()))
        log, results = check_end(objects, state, lines)
        assert log.closed
        if len(results) < len(lines):
            # A part was written, read by who closed the log, and damaged then.
            assert any(path.endswith(DAMAGED) for path in objects)

    return check


def shown(name: str, scripts: Sequence[Script], faults: int, check: Check) -> None:
    """Explore, and print how much there was."""
    with capture_logs():
        found = Explorer(scripts, check).explore(faults)
    print(
        f"\n{name}: {found.interleavings:,} interleavings, {found.states:,} states, "
        f"{found.ends:,} ends"
    )
    assert found.interleavings > 1000


TWO: Final = range(2)
THREE: Final = range(3)


@pytest.mark.promise("batch-results")
def test_two_writers_and_a_finalizer_give_each_line_one_result() -> None:
    scripts = [writer("a", THREE, first=[2, 0]), writer("b", THREE, first=[1]), finalizer(THREE)]
    shown("cancel", scripts, 0, check_undamaged(THREE))


@pytest.mark.promise("batch-results")
def test_a_writer_that_ends_or_gets_no_answer_changes_no_result() -> None:
    scripts = [writer("a", TWO, first=[1], noted=FAILED), writer("b", TWO), finalizer(TWO)]
    shown("one fault", scripts, 1, check_undamaged(TWO, attempts=1))


@pytest.mark.promise("batch-results")
@pytest.mark.parametrize("what", [damage, mark])
def test_readers_agree_about_a_part_that_is_damaged(what: Callable[[int], Script]) -> None:
    scripts = [writer("a", TWO, first=[1]), finalizer(TWO), what(0)]
    shown(what.__name__, scripts, 1, check_damaged(TWO))


class _Blind(ChunkLog):
    """Does not read the part that it finds."""

    async def _read_next(self) -> bool:
        found = await self._objects.read(self._path(self._next)) is not None
        self._next += found
        return found


class _Forgetful(ChunkLog):
    """Does not know what it tried to write."""

    async def _create(self, *arguments: Any, **named: Any) -> bool:
        try:
            return await super()._create(*arguments, **named)
        finally:
            self._tried.clear()


@pytest.mark.parametrize(
    ("log_class", "what"), [(_Blind, "Counter"), (_Forgetful, "an attempt counts twice")]
)
def test_a_log_that_breaks_the_rule_is_found(log_class: type[ChunkLog], what: str) -> None:
    scripts = [
        writer("a", TWO, first=[1], noted=FAILED, log_class=log_class),
        writer("b", TWO, log_class=log_class),
    ]
    with pytest.raises(AssertionError, match=what):
        Explorer(scripts, check_undamaged(TWO, attempts=1)).explore(1)


@pytest.mark.exhaustive
@pytest.mark.promise("batch-results")
def test_all_orders_with_a_fault() -> None:
    scripts = [
        writer("a", THREE, first=[1], noted=FAILED),
        writer("b", THREE, first=[0]),
        finalizer(THREE),
    ]
    shown("three lines, one fault", scripts, 1, check_undamaged(THREE, attempts=1))


@pytest.mark.exhaustive
@pytest.mark.promise("batch-results")
def test_all_orders_with_two_faults() -> None:
    scripts = [writer("a", TWO, first=[1], noted=FAILED), writer("b", TWO, first=[0])]
    shown("two faults", scripts, 2, check_undamaged(TWO, attempts=1))


@pytest.mark.exhaustive
@pytest.mark.promise("batch-results")
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("what", [damage, mark])
def test_all_orders_with_damage(what: Callable[[int], Script], number: int) -> None:
    scripts = [writer("a", TWO, first=[1]), writer("b", TWO), finalizer(TWO), what(number)]
    shown(f"{what.__name__} of part {number}", scripts, 0, check_damaged(TWO))
