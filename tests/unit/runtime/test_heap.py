"""The garbage collector looks seldom, and not at what the start left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fleetkeeper.runtime import heap


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threshold, frozen = gc.get_threshold(), gc.get_freeze_count()
    yield
    gc.set_threshold(*threshold)
    if not frozen:
        gc.unfreeze()


def test_young_objects_are_looked_at_seldom_and_older_ones_as_before() -> None:
    before = gc.get_threshold()
    heap.reduce_frequency()
    assert gc.get_threshold() == (heap.YOUNG_OBJECTS, *before[1:])


def test_what_was_there_at_the_start_is_not_looked_at_again() -> None:
    kept = [[number] for number in range(1000)]
    heap.settle()
    assert gc.get_freeze_count() >= len(kept)
