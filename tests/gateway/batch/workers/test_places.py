"""Places and homes, as the processes of a pod share them."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.workers.handling import Handling, create_memory
from fleetkeeper_gateway.batch.workers.places import SLOTS, Places, create_rows

BATCH = "batch_" + "0a" * 16


def places_of(processes: int, total: int) -> list[Places]:
    rows = create_rows(processes)
    return [Places(rows, number, total) for number in range(processes)]


def start(places: Places, key: str) -> int:
    """Start all lines of a key that may start; return their number."""
    count = 0
    while places.room(key):
        places.start(key)
        count += 1
    return count


@pytest.mark.parametrize("total", [1, 2, 7, 8, 100, 1024])
def test_a_key_alone_leaves_an_eighth(total: int) -> None:
    one, two = places_of(2, total)
    assert one.room("a") == max(1, total - total // 8)
    assert start(one, "a") + start(two, "a") == total - total // 8
    assert one.running == total - total // 8


def test_a_flood_in_every_place_leaves_an_eighth_for_others() -> None:
    one, two = places_of(2, 1024)
    for _ in range(896):
        one.start("a")
    one.ready({"a": 10_000})
    assert start(one, "a") == 0
    found = [start(two, key) for key in "bcdefgh"]
    assert found == [64, 32, 16, 8, 4, 2, 1], "each as many as it leaves free"
    assert start(two, "b") == 0
    assert two.room("new"), "and one that holds none has the last place"
    two.ready({"b": 100})
    for _ in range(300):
        one.end("a")
    assert not one.room("a"), "it has more than its part while others want theirs"
    assert two.room("b") > 170


def test_two_keys_that_want_all_places_have_half_of_them() -> None:
    one, two = places_of(2, 100)
    one.ready({"a": 1000})
    two.ready({"b": 1000})
    assert start(one, "a") == 50
    assert start(two, "b") == 38, "without the reserve"
    two.ready({"b": 0})
    assert not one.room("a"), "the reserve is not for it"
    for _ in range(38):
        two.end("b")
    assert start(one, "a") == 38


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(("start", "end", "ready"))),
        max_size=300,
    ),
    st.integers(1, 64),
)
def test_a_key_that_runs_nothing_finds_a_place_unless_all_are_taken(
    steps: Sequence[tuple[str, str]], total: int
) -> None:
    all_places = places_of(3, total)
    running: Counter[tuple[int, str]] = Counter()
    for number, (key, what) in enumerate(steps):
        process = number % 3
        places = all_places[process]
        if what == "ready":
            places.ready({key: number % 5})
        elif what == "end" and running[process, key]:
            places.end(key)
            running[process, key] -= 1
        elif what == "start" and places.room(key):
            places.start(key)
            running[process, key] += 1
        count = running.total()
        assert [one.running for one in all_places] == [count] * 3
        assert count <= total
        assert bool(all_places[0].room("new")) == (count < total)


def test_a_process_has_lines_of_a_bounded_number_of_keys() -> None:
    (places,) = places_of(1, 1000)
    for number in range(SLOTS):
        places.start(f"key-{number}")
    assert not places.room("one more")
    places.ready({"one more": 5})
    assert places.room("key-0")
    places.end("key-0")
    assert places.room("one more")


def test_a_process_that_ended_holds_no_place() -> None:
    rows = create_rows(2)
    one, two = Places(rows, 0, 10), Places(rows, 1, 10)
    start(one, "a")
    one.serve("a")
    assert two.choose_home({"a": 0}) is None
    Places(rows, 0, 10).clear()
    assert (two.running, two.room("b")) == (0, 9)
    assert two.choose_home({"a": 0}) == "a"


# -- homes ------------------------------------------------------------------------------------------


def settle(processes: Sequence[Places], waiting: dict[str, int]) -> list[str | None]:
    """Let each process choose its home, as often as it takes."""
    homes: list[str | None] = [None] * len(processes)
    for _ in range(5):
        for number, one in enumerate(processes):
            homes[number] = one.choose_home(waiting)
            one.serve(homes[number])
    return homes


@pytest.mark.parametrize(
    ("processes", "keys", "homes"),
    [
        (4, "a", ["a", "a", None, None]),
        (4, "ab", ["a", "b", None, None]),
        (4, "abc", ["a", "b", "c", None]),
        (4, "abcde", ["a", "b", "c", "d"]),
        (2, "a", ["a", None]),
        (1, "ab", ["a"]),
    ],
)
def test_two_processes_are_kept_for_keys_that_none_serves(
    processes: int, keys: str, homes: list[str | None]
) -> None:
    assert settle(places_of(processes, 100), dict.fromkeys(keys, 0)) == homes


def test_a_key_with_two_processes_gives_one_to_a_key_that_has_none() -> None:
    processes = places_of(4, 100)
    assert settle(processes, {"a": 9}) == ["a", "a", None, None]
    assert settle(processes, {"a": 9, "b": 0, "c": 0})[:2] == ["a", "a"], "there are free ones"
    assert sorted(map(str, settle(processes, dict.fromkeys("abcd", 0)))) == ["a", "b", "c", "d"]


def test_the_key_with_the_fewest_lines_over_all_pods_is_first() -> None:
    (one,) = places_of(1, 100)
    assert one.choose_home({"a": 10, "b": 3, "c": 5}) == "b"
    assert one.choose_home({}) is None


def test_with_more_keys_than_processes_each_has_its_turn() -> None:
    """A process leaves its key for one that none serves and that has fewer lines."""
    (one,) = places_of(1, 100)
    taken: Counter[str] = Counter()
    for _ in range(30):
        key = one.choose_home(dict.fromkeys("abc", 0))
        assert key is not None
        one.serve(key)
        one.start(key)
        taken[key] += 1
    assert set(taken.values()) == {10}


# -- the line that is handled -----------------------------------------------------------------------


def test_the_line_that_is_handled_is_known_outside_and_only_meanwhile() -> None:
    memory = create_memory()
    handling, outside = Handling(memory), Handling(memory)
    assert outside.read() is None
    with handling(BATCH, 4_000_000_000):
        assert outside.read() == (BATCH, 4_000_000_000)
    assert outside.read() is None
    with pytest.raises(KeyError), handling(BATCH, 1):
        raise KeyError
    assert outside.read() is None


def _die(memory: Any, rows: Any) -> None:
    places = Places(rows, 0, 100)
    places.start("a")
    places.serve("a")
    with Handling(memory)(BATCH, 7):
        os._exit(9)


def test_the_parent_knows_what_a_process_did_when_it_ended() -> None:
    memory, rows = create_memory(), create_rows(2)
    child = multiprocessing.get_context("forkserver").Process(target=_die, args=(memory, rows))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert Handling(memory).read() == (BATCH, 7)
    assert Places(rows, 1, 100).running == 1
