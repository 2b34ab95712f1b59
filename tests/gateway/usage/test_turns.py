"""What one engine's page can take of the event loop that reads all engines, in processor time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetkeeper_gateway.usage.engines import PAGE_BYTES, parse_page
from fleetkeeper_gateway.usage.pages import MAX_PAGE_ENTRIES
from tests.support.gateway.usage_ledgers import NOW, Ledger, an_entry, opened
from tests.support.processor_units import units_of

pytestmark = pytest.mark.usefixtures("without_collections")

MAX_TURN = 200
"""Units (100 ms where this was written): the worst page takes 50 ms, of a process that serves no request."""
MAX_APPEND = 60
"""Units: a small page takes less than 2; with the hour's file, 280."""
LONG = "x" * 240
WHOLE_PAGES = 30


def filled(one: bytes) -> bytes:
    """A page whose ignored field has this value as often as there is room."""
    page = json.dumps(Ledger("pod").document("", 0)).encode()
    start = page[:-1] + b', "ignored": ['
    return start + one * ((PAGE_BYTES - len(start) - 8) // len(one)) + b"{}]}"


def many_names() -> bytes:
    """As many entries as a page may have, each of an attempt and a model of its own."""
    ledger = Ledger("pod")
    for number in range(MAX_PAGE_ENTRIES):
        name = f"{number:05}-{LONG}"
        ledger.add(an_entry(name, NOW, 1, request=name, key=f"{LONG}-{number}", model=name))
    return json.dumps(ledger.document("", 0)).encode()


PAGES: dict[str, Callable[[], bytes]] = {
    "names": many_names,
    "objects": lambda: filled(b"{},"),
    "nested": lambda: filled(b'{"a":{"b":[]}},'),
    "numbers": lambda: filled(b"1,"),
    "escapes": lambda: filled(b'"\\u0041\\n",'),
}


@pytest.mark.promise("usage-checked")
@pytest.mark.parametrize("name", PAGES)
def test_no_page_holds_the_loop_that_reads_all_engines(name: str, tmp_path: Path) -> None:
    data, store, numbers = PAGES[name](), opened(tmp_path), itertools.count()

    def take() -> None:
        store.append(parse_page(data), Ledger(f"pod-{next(numbers)}").pod, NOW)

    assert units_of(take, MAX_TURN) < MAX_TURN


def test_the_first_page_after_a_restart_reads_no_file_again(tmp_path: Path) -> None:
    """An hour's file may have a million lines, and the probes of the process are not answered meanwhile."""
    ledger, store = Ledger("pod", capacity=1_000_000), opened(tmp_path)
    for number in range(WHOLE_PAGES * MAX_PAGE_ENTRIES):
        ledger.add(an_entry(f"attempt-{number}", NOW, 1))
    ledger.read_into(store, NOW)
    numbers = itertools.count()

    def restart() -> None:
        nonlocal store
        store.close()
        ledger.add(an_entry(f"one more {next(numbers)}", NOW, 1))
        store = opened(tmp_path)

    def append() -> None:
        ledger.read_into(store, NOW)

    assert units_of(append, MAX_APPEND, prepare=restart) < MAX_APPEND
