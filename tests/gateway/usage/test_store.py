"""The files with usage: nothing counts twice and nothing is lost, whenever the process ends."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_contract.usage_files import hours_of_files
from fleetkeeper_gateway.usage.store import RAW_HOURS
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
from tests.support.guards import GUARD_S

HOUR = 3600.0


def test_every_prefix_of_a_file_is_a_state_to_continue_from(tmp_path: Path) -> None:
    ledger = Ledger("pod-1", page_entries=2)
    store = opened(tmp_path / "whole")
    for number in range(4):
        ledger.add(an_entry(f"a-{number}", NOW + number, number + 1))
        ledger.read_into(store, NOW + number)
    store.close()
    (path,) = (tmp_path / "whole").iterdir()
    data = path.read_bytes()
    for size in range(len(data) + 1):
        directory = tmp_path / f"cut-{size}"
        directory.mkdir()
        (directory / path.name).write_bytes(data[:size])
        store = opened(directory)
        ledger.read_into(store, NOW + 10)
        assert_complete(whole(store), ledger)
        store.close()


def test_a_file_is_not_closed_while_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread syncs it, and a new hour closes it."""
    ledger, store = Ledger("pod-1"), opened(tmp_path)
    ledger.add(an_entry("a-1", NOW, 1))
    ledger.read_into(store, NOW)
    syncing, may_sync, sync = threading.Event(), threading.Event(), os.fsync
    closed: list[bool] = []

    def slow(descriptor: int) -> None:
        if threading.current_thread().name == "syncs":
            syncing.set()
            assert may_sync.wait(GUARD_S)
            closed.append(store._file is None)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    threads = [threading.Thread(target=store.sync, name="syncs")]
    threads[0].start()
    assert syncing.wait(GUARD_S)
    threads.append(threading.Thread(target=store.close))
    threads[1].start()
    threads[1].join(0.5)
    may_sync.set()
    for thread in threads:
        thread.join(GUARD_S)
    assert closed == [False]
    assert store._file is None


def test_damage_in_the_middle_costs_what_follows_and_it_is_read_again(tmp_path: Path) -> None:
    """As after a loss of power, when some blocks of a file are zeros."""
    ledger = Ledger("pod-1")
    store = opened(tmp_path)
    for number in range(4):
        ledger.add(an_entry(f"a-{number}", NOW, 1))
        ledger.read_into(store, NOW)
    store.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 100] = bytes(100)
    path.write_bytes(data)
    store = opened(tmp_path)
    assert store.cursor("pod-1").next < 4
    ledger.read_into(store, NOW)
    assert_complete(whole(store), ledger)


def test_a_disk_without_room_keeps_what_is_there_and_reads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger("pod-1")
    store = opened(tmp_path)
    ledger.add(an_entry("a", NOW, 1))
    ledger.read_into(store, NOW)
    ledger.add(an_entry("b", NOW, 2))
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: real(file, data[:20]))
        with pytest.raises(OSError, match="the disk is full"):
            ledger.read_into(store, NOW)
    assert store.cursor("pod-1").next == 1
    ledger.read_into(store, NOW)
    assert_complete(whole(store), ledger)
    (path,) = tmp_path.iterdir()
    assert ends_of_groups(path)[-1] == path.stat().st_size


def test_a_request_counts_in_the_hour_in_which_it_ended(tmp_path: Path) -> None:
    """23:59:59.9 and 00:00:00.0 are two hours, also if both are read in the later one."""
    ledger = Ledger("pod-1")
    store = opened(tmp_path)
    midnight = NOW + HOUR
    for time in (NOW - 0.1, NOW, midnight - 0.1, midnight, midnight + 5):
        ledger.add(an_entry(f"a-{time}", time, 10))
    ledger.read_into(store, midnight + 6)

    def requests(since: float, until: float) -> int:
        return sum(row.requests for row in store.report(since, until, ("key",)).rows.values())

    assert requests(NOW - HOUR, NOW) == 1
    assert requests(NOW, midnight) == 2
    assert requests(midnight, midnight + HOUR) == 2
    # An hour counts whole, from the one that contains `since`.
    assert requests(NOW + 1800, midnight + 1) == 4
    store.tidy(midnight + 10 * HOUR)
    assert requests(NOW, midnight) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"2025-11-26T00.jsonl"}


@pytest.mark.promise("usage-checked")
@pytest.mark.parametrize("claimed", [0.0, NOW - 9 * 86_400, NOW + 86_400.0, 2.0**60])
def test_an_engine_cannot_hide_tokens_in_another_time(tmp_path: Path, claimed: float) -> None:
    ledger = Ledger("pod-1")
    store = opened(tmp_path)
    ledger.add(an_entry("first", NOW, 1))
    ledger.read_into(store, NOW)
    ledger.add(an_entry("second", claimed, 10))
    ledger.read_into(store, NOW + 100)
    report = store.report(NOW - HOUR, NOW + HOUR, ("key",))
    assert_complete(report, ledger)


def test_past_hours_keep_sums_alone(tmp_path: Path) -> None:
    first, second = some_ledgers()
    store = opened(tmp_path)
    for number in range(RAW_HOURS + 2):
        now = NOW + number * HOUR + 100
        fill(first, second, now, number)
        first.read_into(store, now)
        second.read_into(store, now)
    before = whole(store).document()
    store.tidy(NOW + (RAW_HOURS + 1) * HOUR)
    assert whole(store).document() == before
    files = [lines_in_file(tmp_path, hour) for hour in hours_in(tmp_path)]
    kept = [any("attempt" in line for line in lines) for lines in files]
    assert kept == [False, False, *[True] * RAW_HOURS]
    assert len(files[0]) == 3, "a sum for the key, one for nobody, and the cursors"
    written = [path.stat().st_ino for path in sorted(tmp_path.iterdir())]
    again = opened(tmp_path, NOW + (RAW_HOURS + 1) * HOUR)
    again.tidy(NOW + (RAW_HOURS + 1) * HOUR)
    assert [path.stat().st_ino for path in sorted(tmp_path.iterdir())] == written
    assert again.cursor("pod-1").next == len(first.entries)


def hours_in(directory: Path) -> list[str]:
    return hours_of_files(path.name for path in directory.iterdir())


def lines_in_file(directory: Path, hour: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"{hour}.jsonl").read_bytes().splitlines()]


def test_files_beyond_the_retention_are_deleted_and_cursors_stay(tmp_path: Path) -> None:
    ledger = Ledger("pod-1")
    store = opened(tmp_path, retention_days=1)
    for number in range(30):
        ledger.add(an_entry(f"a-{number}", NOW + number * HOUR, 1))
        ledger.read_into(store, NOW + number * HOUR)
    store.tidy(NOW + 29 * HOUR)
    assert len(hours_in(tmp_path)) == 25
    store.close()
    # Nobody was served for a week: only the newest file is left, with the cursors.
    store = opened(tmp_path, NOW + 200 * HOUR, retention_days=1)
    ledger.read_into(store, NOW + 200 * HOUR)
    store.tidy(NOW + 200 * HOUR)
    store.close()
    store = opened(tmp_path, NOW + 300 * HOUR, retention_days=1)
    assert store.cursor("pod-1").next == 30


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    for name in ("lost+found", "notes.jsonl", "2025-13-01T00.jsonl"):
        (tmp_path / name).write_text("keep me")
    store = opened(tmp_path, retention_days=1)
    ledger = Ledger("pod-1")
    ledger.add(an_entry("a", NOW, 1))
    ledger.read_into(store, NOW)
    store.tidy(NOW + 90 * 86_400)
    assert_complete(whole(store), ledger)
    assert (tmp_path / "notes.jsonl").read_text() == "keep me"


def test_what_a_ring_overwrote_is_told_in_entries_and_tokens(tmp_path: Path) -> None:
    ledger = Ledger("pod-1", capacity=5, page_entries=2)
    store = opened(tmp_path)
    for number in range(4):
        ledger.add(an_entry(f"a-{number}", NOW, 10))
    ledger.read_into(store, NOW)
    for number in range(4, 16):
        ledger.add(an_entry(f"a-{number}", NOW, 10))
    ledger.read_into(store, NOW)
    report = whole(store)
    assert_complete(report, ledger)
    assert (report.lost.requests, report.lost.prompt, report.lost.answer) == (7, 70, 140)


def test_a_new_boot_is_read_from_its_start(tmp_path: Path) -> None:
    ledger = Ledger("pod-1")
    store = opened(tmp_path)
    ledger.add(an_entry("a", NOW, 1))
    ledger.read_into(store, NOW)
    after = Ledger("pod-1", boot="boot-2")
    for name in ("b", "c"):
        after.add(an_entry(name, NOW, 10))
    after.read_into(store, NOW)
    report = whole(store)
    assert_complete(report, ledger, after)
    assert report.lost.requests == 0


def test_a_clock_that_is_set_back_repeats_nothing(tmp_path: Path) -> None:
    """The newest file stays the one with the newest cursors, also after a restart."""
    ledger = Ledger("pod-1")
    store = opened(tmp_path)
    for number, now in enumerate([NOW, NOW + HOUR, NOW - 5 * HOUR, NOW - 2 * HOUR]):
        ledger.add(an_entry(f"a-{number}", now, 1))
        ledger.read_into(store, now)
        store.close()
        store = opened(tmp_path, now)
        ledger.read_into(store, now)
    assert_complete(whole(store), ledger)


def test_an_old_cursor_is_forgotten_only_when_its_pod_was_long_not_read(tmp_path: Path) -> None:
    kept, gone = Ledger("kept"), Ledger("gone")
    store = opened(tmp_path)
    for ledger in (kept, gone):
        ledger.add(an_entry(ledger.name, NOW, 1))
        ledger.read_into(store, NOW)
    for day in range(1, 10):
        now = NOW + day * 86_400
        kept.read_into(store, now)
    busy = Ledger("busy")
    busy.add(an_entry("busy", now, 1))
    busy.read_into(store, now)
    store.close()
    store = opened(tmp_path, now)
    assert store.cursor("kept").next == 1
    assert_complete(whole(store), kept, gone, busy)
    newest = lines_in_file(tmp_path, hours_in(tmp_path)[-1])[-1]
    assert {cursor["pod"] for cursor in newest["cursors"]} == {"kept", "busy"}
