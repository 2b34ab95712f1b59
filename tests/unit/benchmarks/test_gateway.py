"""The parts of the gateway's benchmark that decide its figures: percentiles, blocks, goals, the upstream."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fleetkeeper_local.common.paths import REPOSITORY

pytestmark = pytest.mark.exhaustive

Part = Callable[[str], ModuleType]


def latency(part: Part, p50: float, p99: float, failed: int = 0) -> Any:
    return part("proxy_figures").LatencyCell(p50, p99, 100, failed, 1.0)


def found(part: Part, **changes: Any) -> Any:
    """Returns figures of one block; the gateway adds 1 ms, and costs a fifth of that of another commit."""
    figures, page = part("proxy_figures"), part("proxy_page")
    names = (figures.OURS, figures.FULL, figures.BEFORE)
    block = {figures.DIRECT: latency(part, 0.5, 1.0)}
    block |= {name: latency(part, 1.5, 5.0) for name in names}
    streams = {figures.DIRECT: figures.StreamCell(1.0, 20.0, 21.0, 0)}
    streams |= {name: figures.StreamCell(2.0, 20.0, 24.0, 0) for name in names}
    per_core = dict(zip(names, (500.0, 490.0, 100.0), strict=True))
    usual = {
        "latency": [block],
        "low": [block],
        "capacity": [{n: figures.CapacityCell(c / 2, c, 0) for n, c in per_core.items()}],
        "streams": [streams],
        "memory": {n: figures.MemoryCell(100.0, 140.0, 1000) for n in names},
    }
    return page.Found(**{**usual, **changes})


def test_a_percentile_is_a_value_that_was_measured(part: Part) -> None:
    percentile = part("proxy_figures").percentile
    values = [float(n) for n in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (
        50,
        99,
        100,
    )
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no request was answered"):
        percentile([], 0.5)


def test_differences_and_ratios_are_of_one_block(part: Part) -> None:
    """The machine is slower by 10 ms in the second block, for all alike."""
    figures = part("proxy_figures")
    blocks = [
        {"direct": latency(part, 1.0, 2.0), "gateway": latency(part, 2.0, 5.0)},
        {"direct": latency(part, 11.0, 12.0), "gateway": latency(part, 12.5, 15.0)},
    ]
    added = figures.added(blocks, "gateway", lambda cell: cell.p50_ms)
    assert (added.median, added.low, added.high) == (1.25, 1.0, 1.5)
    assert figures.ratio(blocks, "gateway", "direct", lambda cell: cell.p99_ms).high == 2.5
    assert added.text(1, " ms") == "1.2 ms (1.0 to 1.5)"


def test_each_contender_is_first_in_turn(part: Part) -> None:
    rotated = part("proxy_figures").rotated
    assert [rotated("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated("abc", 2)) == ["a", "b", "c"]


def test_goals_are_told_as_met_or_missed(part: Part) -> None:
    page, figures = part("proxy_page"), part("proxy_figures")
    assert all(goal.met for goal in page.goals(found(part)))
    slow = {figures.DIRECT: latency(part, 0.5, 1.0), figures.OURS: latency(part, 2.1, 9.5)}
    slow |= {figures.FULL: latency(part, 2.5, 9.5), figures.BEFORE: latency(part, 9.0, 9.5)}
    missed = [goal.text for goal in page.goals(found(part, latency=[slow])) if not goal.met]
    assert missed == [
        "added latency P50 <= 1.5 ms",
        "added latency P99 <= 8 ms",
        "1,000 services and 10,000 keys change at most 10%: latency P50",
    ]
    text = page.tables(found(part, latency=[slow]))
    assert text.count("**missed**") == 3


def test_failed_requests_are_told(part: Part) -> None:
    figures = part("proxy_figures")
    block = dict(found(part).latency[0])
    block[figures.BEFORE] = latency(part, 1.0, 2.0, failed=7)
    text = part("proxy_page").tables(found(part, latency=[block]))
    assert "\n7 requests failed." in text


def test_the_page_has_a_column_for_each_contender(part: Part) -> None:
    lines = part("proxy_page").tables(found(part)).splitlines()
    head = next(line for line in lines if "| direct |" in line)
    rows = lines[lines.index(head) + 2 :]
    assert rows
    assert {row.count("|") for row in rows if row} == {head.count("|")}


def test_the_page_says_what_was_run(part: Part) -> None:
    page, size = part("proxy_page"), part("measures").FULL_SIZE
    text = page.setting("7.0.15", size)
    assert "Redis 7.0.15" in text
    assert "4 blocks" in text


def test_another_commit_has_a_column_with_ratios(part: Part) -> None:
    lines = part("proxy_page").tables(found(part)).splitlines()
    head = next(line for line in lines if "| direct |" in line)
    assert head.endswith("| before | gateway / before |")
    row = next(line for line in lines if line.startswith("| requests/s for a core"))
    assert row.startswith("| requests/s for a core of the gateway, 16 clients |  | 500 ")
    assert row.endswith("| 5.00 (5.00 to 5.00) |")
    names = ("gateway", "gateway, full")
    memory = {n: part("proxy_figures").MemoryCell(100.0, 140.0, 1000) for n in names}
    assert "before |" not in part("proxy_page").tables(found(part, memory=memory))


def test_the_gateway_of_another_checkout_runs_in_its_own_environment(part: Part) -> None:
    python, entry = part("contenders").entry_of(REPOSITORY)
    assert Path(python).samefile(sys.executable)
    assert Path(entry).samefile(REPOSITORY / "tests/support/gateway/gateway_entry.py")


def test_streams_that_do_not_begin_in_time_have_no_memory(part: Part) -> None:
    figures, page = part("proxy_figures"), part("proxy_page")
    cell = figures.MemoryCell(413.0, None, 1000)
    names = (figures.OURS, figures.FULL)
    memory = {n: figures.MemoryCell(100.0, 140.0, 1000) for n in names} | {figures.BEFORE: cell}
    text = page.tables(found(part, memory=memory))
    assert "413 MiB | 0.24 |\n| resident memory with 1,000 open streams" in text
    assert "| 140 MiB | 140 MiB | not all began in 60 s |  |" in text


def test_the_upstream_streams_as_many_frames_as_asked(part: Part) -> None:
    """Read by the benchmark's own client, so both ends of a measurement are tested."""

    async def measured() -> tuple[Any, Any, Any]:
        upstream, client = part("thin_upstream"), part("thin_client")
        server = await asyncio.get_running_loop().create_server(upstream.Upstream, "127.0.0.1", 0)
        async with server:
            target = client.Target(server.sockets[0].getsockname()[1], {})
            whole = await client.closed_loop(target, clients=2, seconds=0.2)
            streams = await client.streams(target, count=3, tokens=5, pace_ms=10)
            opened = await client.open_loop(target, rate=100.0, seconds=0.3, seed=1)
            async with client.HeldStreams(target, 4) as held:
                assert held.open == 4
        return whole, streams, opened

    whole, streams, opened = asyncio.run(measured())
    assert whole.seconds
    assert whole.failed == opened.failed == streams.failed == 0
    assert len(streams.first) == 3
    assert len(streams.gaps) == 3 * 4
    assert opened.seconds


def test_a_stream_that_is_cut_short_has_failed(part: Part) -> None:
    client = part("thin_client")
    streams = client.Streams()
    streams.add(client.Answer(200, [1.0, 2.0], ended=True), sent=0.5, tokens=3)
    streams.add(client.Answer(200, [1.0, 2.0, 3.0], ended=False), sent=0.5, tokens=3)
    streams.add(client.Answer(429, [], ended=True), sent=0.5, tokens=0)
    assert (streams.failed, streams.gaps) == (3, [])


def test_what_a_body_asks_for(part: Part) -> None:
    asked = part("thin_upstream").asked
    assert asked(b'{"stream": true, "max_tokens": 7, "seed": 20}') == (7, 0.02)
    assert asked(b'{"stream":true}') == (16, 0.0)
    assert asked(b'{"stream": false, "max_tokens": 7}') is None


def test_direct_requests_have_no_processor_time(part: Part) -> None:
    contenders = part("contenders")
    assert contenders.direct(1).cpu_s() == 0.0
    assert math.isinf(part("proxy_figures").CapacityCell(1.0, math.inf, 0).per_core_s)
