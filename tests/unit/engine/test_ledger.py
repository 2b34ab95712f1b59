"""The ring of usage entries: what is written is read, whole, and what is missing is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.shm.ledger import (
    PAGE_ENTRIES,
    Entry,
    LedgerReader,
    LedgerWriter,
    Sums,
    Tokens,
    path_of_environment,
)
from fleetkeeper_engine.supervisor.control_api.usage import page

COUNTS = st.integers(0, 2**31)
TEXTS = st.text(max_size=40)
ENTRIES = st.builds(
    Entry,
    st.builds(Tokens, COUNTS, COUNTS, COUNTS),
    st.floats(0, 1e11),
    attempt=TEXTS,
    request=TEXTS,
    key=TEXTS,
    adapter=TEXTS,
    tier=st.sampled_from([None, *Tier]),
    aborted=st.booleans(),
)


def entry(number: int, *, attempt: str = "a") -> Entry:
    return Entry(
        Tokens(number, 1, 2),
        1000.0 + number,
        attempt=attempt and f"{attempt}-{number}",
        request=f"r-{number}",
        key="key",
        tier=Tier.STANDARD,
    )


def read_page(path: Path, after: int = 0) -> dict[str, Any]:
    reader = LedgerReader.open(path)
    assert reader is not None
    with reader:
        head = reader.head()
        assert head is not None
        found: dict[str, Any] = json.loads(b"".join(page(reader, head, "served", after)))
        return found


@given(entries=st.lists(ENTRIES, max_size=20), capacity=st.integers(1, 8))
@settings(deadline=None)
def test_the_newest_entries_are_read_as_they_were_written(
    entries: list[Entry], capacity: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    writer = LedgerWriter.open(path, capacity)
    for item in entries:
        writer.write(item)
    writer.close()
    reader = LedgerReader.open(path)
    assert reader is not None
    with reader:
        head = reader.head()
        assert head is not None
        assert head.newest == len(entries)
        first = reader.oldest(head)
        kept = list(reader.entries(first, head.newest))
    assert [item for _, item, _ in kept] == entries[first - 1 :]
    assert len(kept) == min(len(entries), capacity)
    sums = Sums()
    for item in entries:
        sums = sums.plus(item)
    assert head.sums == sums
    assert not kept or kept[-1][2] == sums


def test_a_new_writer_continues_numbers_and_sums(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = LedgerWriter.open(path, 4)
    for number in range(1, 4):
        first.write(entry(number))
    first.close()
    second = LedgerWriter.open(path, 4)
    assert second.boot == first.boot
    assert second.head == first.head
    second.write(entry(4))
    assert [item["n"] for item in read_page(path)["entries"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b"", b"FKUSAGE1", b"\0" * 9000, os.urandom(9000)])
def test_a_damaged_file_is_replaced_under_another_boot(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "ledger"
    before = LedgerWriter.open(path, 4)
    before.write(entry(1))
    before.close()
    path.write_bytes(damage)
    after = LedgerWriter.open(path, 4)
    assert after.boot != before.boot
    assert read_page(path)["entries"] == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_cut_of_a_head_or_record_is_noticed(tmp_path: Path) -> None:
    """A record that is half overwritten is left out; the sums of the next one show what it had."""
    path = tmp_path / "ledger"
    writer = LedgerWriter.open(path, 4)
    for number in range(1, 4):
        writer.write(entry(number))
    whole = path.read_bytes()
    for place in range(4096 + 512, 4096 + 512 + 128):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        found = read_page(path)
        assert [item["n"] for item in found["entries"]] == [1, 3]
        assert found["lost"] == 1
        assert found["totals"] == {"prompt": 6, "cached": 3, "answer": 6}
    for place in range(64, 64 + 60):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        reader = LedgerReader.open(path)
        assert reader is not None
        with reader:
            assert reader.head() is None


def test_pages_continue_and_tell_what_was_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    capacity = PAGE_ENTRIES + 500
    writer = LedgerWriter.open(path, capacity)
    for number in range(1, capacity + 101):
        writer.write(entry(number, attempt="a" if number % 2 else ""))
    first = read_page(path)
    assert (first["oldest"], first["next"], first["lost"]) == (101, 100 + PAGE_ENTRIES, 100)
    assert len(first["entries"]) == PAGE_ENTRIES
    second = read_page(path, first["next"])
    assert (second["next"], second["lost"]) == (capacity + 100, 0)
    assert len(second["entries"]) == 500
    last = read_page(path, second["next"])
    assert (last["entries"], last["lost"], last["totals"]) == ([], 0, second["totals"])
    numbers = range(1, capacity + 101)
    assert last["totals"]["prompt"] == sum(numbers)
    assert last["unattributed"]["prompt"] == sum(number for number in numbers if number % 2 == 0)
    # The sums up to the first page, less its entries, are what the overwritten ones had.
    had = sum(item["prompt"] for item in first["entries"])
    assert first["totals"]["prompt"] - had == sum(range(1, 101))


def test_an_entry_names_model_tier_and_sender_only_if_known(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    writer = LedgerWriter.open(path, 4)
    writer.write(Entry(Tokens(1, 0, 2), 5.0))
    writer.write(Entry(Tokens(3, 1, 4), 6.0, "at", "rq", "ky", "lora", Tier.BATCH, aborted=True))
    plain, full = read_page(path)["entries"]
    unknown = {name: plain[name] for name in ("attempt", "request", "key", "tier")}
    assert set(unknown.values()) == {None}
    assert plain["model"] == "served"
    assert full == {
        **dict(
            zip(("attempt", "request", "key", "tier"), ("at", "rq", "ky", "batch"), strict=True)
        ),
        **dict(zip(("prompt", "cached", "answer"), (3, 1, 4), strict=True)),
        "n": 2,
        "model": "lora",
        "aborted": True,
        "time": 6.0,
    }


def test_texts_that_do_not_fit_never_lose_tokens(tmp_path: Path) -> None:
    """The sender is kept before the names; a sender that is too long is as if there were none."""
    path = tmp_path / "ledger"
    writer = LedgerWriter.open(path, 4)
    writer.write(Entry(Tokens(1), 1.0, "a" * 36, "r" * 100, "k" * 253, "l" * 200))
    writer.write(Entry(Tokens(2), 2.0, "a" * 300, "r", "k"))
    first, second = read_page(path)["entries"]
    assert (first["attempt"], first["key"], first["model"]) == ("a" * 36, "k" * 253, "served")
    assert (second["attempt"], second["key"], second["prompt"]) == (None, None, 2)
    assert read_page(path)["unattributed"]["prompt"] == 2


def test_a_full_file_system_costs_the_entry_and_not_its_number(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    writer = LedgerWriter.open(path, 4)
    writer.write(entry(1))
    broken = LedgerWriter(os.open("/dev/full", os.O_WRONLY), 4, writer.boot, writer.head)
    with pytest.raises(OSError, match="No space"):
        broken.write(entry(2))
    again = LedgerWriter(os.open(path, os.O_RDWR), 4, writer.boot, broken.head)
    again.write(entry(3))
    found = read_page(path)
    assert [item["n"] for item in found["entries"]] == [1, 3]
    assert (found["lost"], found["errors"]) == (1, 1)
    assert found["totals"]["prompt"] == 6


def test_the_ledger_lies_beside_the_shared_region() -> None:
    variable = {"FLEETKEEPER_SHARED_MEMORY": "/dev/shm/fleetkeeper/shared-memory"}
    assert path_of_environment(variable) == Path("/dev/shm/fleetkeeper/usage-ledger")
    assert path_of_environment({}) is None
