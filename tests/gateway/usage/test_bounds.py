"""What of a page is believed, and how much of the volume one engine can take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.usage import bounds, metrics
from fleetkeeper_gateway.usage.engines import UnreadableError, parse_page
from fleetkeeper_gateway.usage.lines import OTHER, Pod
from fleetkeeper_gateway.usage.pages import MAX_COUNT, MAX_PAGE_TOKENS
from tests.support.gateway.usage_ledgers import NOW, Ledger, all_counts, an_entry, opened, whole

HOUR = 3600.0
EDGES = (0, 1, MAX_PAGE_TOKENS // 3, MAX_PAGE_TOKENS, MAX_COUNT - 1, MAX_COUNT)


def _page(
    *,
    boot: str = "boot",
    counts: Sequence[int] = (),
    totals: int = 0,
    skipped: int = 0,
    age: float = 0.0,
    granted: bool = False,
) -> bytes:
    grant = {"attempt": boot, "request": "r", "key": "key-1"} if granted else {}
    entries = [
        {
            **an_entry(None, NOW + age, 0),
            **grant,
            "n": number,
            "prompt": count,
            "answer": count // 2,
        }
        for number, count in enumerate(counts, start=1)
    ]
    newest = min(MAX_COUNT, len(entries) + skipped)
    sums = {"prompt": totals, "cached": 0, "answer": totals}
    page = {"boot": boot, "next": newest, "newest": newest, "counting": True, "errors": 0}
    return json.dumps({**page, "entries": entries, "totals": sums, "lost": 0}).encode()


PAGES = st.builds(
    _page,
    boot=st.sampled_from(["boot-1", "boot-2"]),
    counts=st.lists(st.sampled_from(EDGES), max_size=6),
    totals=st.sampled_from(EDGES),
    skipped=st.sampled_from(EDGES),
    age=st.sampled_from([-(2.0**60), -HOUR, 0.0, 2.0**60]),
    granted=st.booleans(),
)


@given(contents=st.lists(PAGES, min_size=1, max_size=3))
def test_any_page_that_is_accepted_can_be_kept_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]
) -> None:
    """Each number at its end. What an engine says was lost is bounded as its entries are."""
    directory = tmp_path_factory.mktemp("usage")
    store = opened(directory)
    pods = [Pod("pod-1", "team", "chat"), Pod("pod-2", "team", "chat")]
    for content in contents:
        with suppress(UnreadableError):
            page = parse_page(content)
            for pod in pods:
                metrics.count("team/chat", store.append(page, pod, NOW))
    cursors = [store.cursor(pod.uid) for pod in pods]
    report = whole(store)
    assert all_counts(report).prompt <= len(contents) * len(pods) * 2 * MAX_PAGE_TOKENS
    store.close()
    store = opened(directory)
    for cursor in cursors:
        kept = store.cursor(cursor.pod)
        assert (kept.boot, kept.next) == (cursor.boot, cursor.next)
    store.append(parse_page(_page(boot="later")), pods[0], NOW + HOUR)
    store.tidy(NOW + 10 * HOUR)
    assert whole(store).document() == report.document()
    store.close()


@pytest.mark.promise("usage-checked")
def test_a_page_with_more_tokens_than_an_engine_can_count_is_refused() -> None:
    half = MAX_PAGE_TOKENS // 2 + 1
    with pytest.raises(UnreadableError, match="tokens together"):
        parse_page(_page(counts=[half, half]))


# -- the volume -----------------------------------------------------------------------------------


def hostile(ledger: Ledger, pages: int, *, models: int) -> None:
    for number in range(pages * ledger.page_entries):
        ledger.add(an_entry(None, NOW, 1, model=f"model-{number % models:05}-" + "x" * 200))


@pytest.mark.promise("usage-checked")
def test_names_of_models_are_bounded_for_each_service(tmp_path: Path) -> None:
    """What has no name of its own is still in the sums; other services keep their names."""
    bad, good = Ledger("bad"), Ledger("good", namespace="other")
    hostile(bad, 5, models=5_000)
    for number in range(3):
        good.add(an_entry(f"good-{number}", NOW, 1, model=f"adapter-{number}"))
    store = opened(tmp_path)
    bad.read_into(store, NOW)
    store.close()
    store = opened(tmp_path)
    bad.add(an_entry(None, NOW, 1, model="one-more"))
    bad.read_into(store, NOW)
    good.read_into(store, NOW)
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    names = {line["model"] for line in lines if line.get("namespace") == "team"}
    assert len(names) == bounds.MAX_MODELS + 1
    assert OTHER in names
    assert "one-more" not in names
    report = whole(store, "model")
    assert set(report.rows) == {("adapter-0",), ("adapter-1",), ("adapter-2",)}
    assert report.unattributed.requests == 5_001
    # The next hour begins with no names.
    bad.add(an_entry(None, NOW + HOUR, 1, model="one-more"))
    bad.read_into(store, NOW + HOUR)
    assert '"model":"one-more"' in (tmp_path / "2025-11-26T00.jsonl").read_text()


@pytest.mark.promise("usage-checked")
@pytest.mark.parametrize("restarted", [False, True])
def test_lines_of_an_hour_are_bounded_for_each_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    """Beyond the bound a page has two lines at most, and its namespace is read less often."""
    monkeypatch.setattr(bounds, "MAX_OTHERS", 300)
    bad, good = Ledger("bad", page_entries=50), Ledger("good", namespace="other")
    hostile(bad, 200, models=40)
    store = opened(tmp_path)
    for page in range(200):
        if restarted and page == 100:
            store.close()
            store = opened(tmp_path)
        cursor = store.cursor("bad")
        store.append(bad.page(cursor.boot, cursor.next), bad.pod, NOW)
    assert (store.is_used_up("team"), store.is_used_up("other")) == (True, False)
    good.add(an_entry(None, NOW, 1))
    good.read_into(store, NOW)
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().splitlines()
    # The bound, the page that reached it, and two lines for each page.
    assert len(lines) < 300 + 42 + 2 * 200 + 2
    report = whole(store, "model")
    assert report.unattributed.requests == 200 * 50 + 1
    assert json.loads(lines[-2])["model"] == "m"
    store.append(bad.page("boot-1", 0), bad.pod, NOW + HOUR)
    assert not store.is_used_up("team")


def test_attempts_beyond_the_bound_are_summed_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may repeat an attempt that was forgotten, so lines of attempts need a bound too."""
    monkeypatch.setattr(bounds, "MAX_ATTEMPTS", 10)
    ledger, store = Ledger("pod-1", page_entries=10), opened(tmp_path)
    for number in range(40):
        ledger.add(an_entry(f"a-{number}", NOW, 1, key=f"key-{number % 2}"))
    ledger.read_into(store, NOW)
    (path,) = tmp_path.iterdir()
    assert len(path.read_bytes().splitlines()) == 11 + 3 * 3
    rows = whole(store, "key").rows
    assert [row.requests for row in rows.values()] == [20, 20]


def test_an_engine_cannot_spoil_the_numbers_of_another_service(tmp_path: Path) -> None:
    """Only a sum over all services would be spoiled, so there is none."""
    store = opened(tmp_path)
    bad = parse_page(_page(totals=MAX_COUNT, skipped=MAX_COUNT))
    metrics.count("bad/chat", store.append(bad, Pod("bad", "bad", "chat"), NOW))
    good = parse_page(_page(counts=[3], totals=3, skipped=5))
    metrics.count("good/chat", store.append(good, Pod("good", "good", "chat"), NOW))
    assert metrics.LOST_ENTRIES.labels("bad/chat")._value.get() == MAX_PAGE_TOKENS
    assert metrics.LOST_ENTRIES.labels("good/chat")._value.get() == 5
    assert metrics.TOKENS.labels("good/chat", "prompt", "false")._value.get() == 3
