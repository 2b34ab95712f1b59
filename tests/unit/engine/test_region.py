"""Shared memory: what is read is what one writer wrote, whole, or nothing."""

from __future__ import annotations

import multiprocessing
import os
import re
import struct
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.histogram_buckets import (
    BATCH_SEQUENCES_EDGES,
    BATCH_TIME_EDGES_S,
    BATCH_TOKENS_EDGES,
    INTER_TOKEN_LATENCY_EDGES_S,
    MAX_LATENCY_RATIO,
    MAX_RATIO,
    QUEUE_WAIT_EDGES_S,
    TIME_TO_FIRST_TOKEN_EDGES_S,
)
from fleetkeeper_contract.step_terms import TERMS
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.stats import products
from fleetkeeper_engine.shm.codec import VERSION, pack_header, places, seal, unpack_header, unseal
from fleetkeeper_engine.shm.layout import (
    CAP,
    HEARTBEAT,
    LOAD,
    MIDDLEWARE,
    SCHEDULER,
    SUPERVISOR,
    CapBlock,
    Cells,
    HeartbeatBlock,
    Layout,
    MiddlewareBlock,
    SchedulerBlock,
    SupervisorBlock,
)
from fleetkeeper_engine.shm.region import Region

LAYOUTS: tuple[Layout[Any], ...] = (SUPERVISOR, MIDDLEWARE, SCHEDULER, HEARTBEAT, CAP, LOAD)
_VALUES = {
    "Q": st.integers(0, 2**64 - 1),
    "d": st.floats(allow_nan=False),
    "?": st.booleans(),
}


def blocks(layout: Layout[Any]) -> st.SearchStrategy[Any]:
    found = {
        name: _VALUES[code] if count == 1 else st.tuples(*[_VALUES[code]] * count)
        for name, code, count in layout.table
        if count < 50
    }
    return st.fixed_dictionaries(found).map(lambda values: layout.kind(**values))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "region"


FORMATS = {
    "SupervisorBlock": "QQQ d ddd ddd ? d ? ??? QQQ d d d d",
    "MiddlewareBlock": "Q Q QQQ QQQ ddd QQQ QQQ QQQ QQQ 15Q Q Q ? 99Q ddd 87Q ddd ? QQQQ",
    "SchedulerBlock": "Q ? ? Q Q Q Q Q Q Q Q QQQ QQQ Q Q Q Q Q Q 168Q ddd 54Q d 41Q d 60Q d 30d",
    "HeartbeatBlock": "Q Q Q ddd",
    "CapBlock": "Q ? ? Q d Q Q Q Q d",
    "LoadBlock": "d",
}
"""The cells of `codec.VERSION` 8 in their order: Q unsigned, d float, ? boolean."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind.__name__)
def test_a_block_has_the_cells_of_this_version_and_holds_its_defaults(layout: Layout[Any]) -> None:
    """Processes of one pod agree on every cell; `codec.VERSION` changes with them."""
    assert VERSION == 8
    cells = "".join(code * count for _, code, count in layout.table)
    counted = re.sub(
        r"(\d+)(\w)", lambda found: int(found[1]) * found[2], FORMATS[layout.kind.__name__]
    )
    assert cells == counted.replace(" ", "")
    assert [name for name, _, _ in layout.table] == [field.name for field in fields(layout.kind)]
    assert layout.unpack(layout.pack(layout.kind())) == layout.kind()
    assert layout.size == 8 * len(cells)


@given(st.tuples(*(blocks(layout) for layout in LAYOUTS)))
def test_every_block_survives_packing(found: tuple[Any, ...]) -> None:
    """What is unpacked equals what was packed, for any values that fit."""
    for layout, block in zip(LAYOUTS, found, strict=True):
        assert layout.unpack(layout.pack(block)) == block


def test_a_tuple_of_another_length_is_refused() -> None:
    """A short tuple would shift every field after it."""
    with pytest.raises(struct.error, match=r"SupervisorBlock\.admit holds 2 of 3"):
        SUPERVISOR.pack(SupervisorBlock(admit=(1.0, 1.0)))


def test_what_one_side_writes_the_other_reads(path: Path) -> None:
    """All five kinds of blocks, through two mappings of one file."""
    writer = Region.create(path, nonce=7, ranks=2)
    reader = Region.open(path)
    assert reader is not None
    assert (reader.nonce, reader.ranks) == (7, 2)
    block = SupervisorBlock(generation=3, sequences=16, admit=(1.0, 0.5, 0.0), draining=True)
    writer.write_supervisor(block)
    writer.write_middleware(MiddlewareBlock(waiting=(1, 2, 3)))
    assert reader.read_heartbeat() == HeartbeatBlock()
    engine = SchedulerBlock(worked_steps=9, supported=True, queue_wait_sum=(0.0, 7.5, 3.25))
    writer.write_scheduler(engine)
    heartbeat = HeartbeatBlock(
        schedule_calls=10, steps=1, tokens=7, oldest_arrival=(0.0, 7.5, 3.25)
    )
    writer.write_heartbeat(heartbeat)
    writer.write_cap(1, CapBlock(armed=True, fraction=0.8))
    assert reader.read_heartbeat() == heartbeat
    assert reader.read_supervisor() == block
    assert reader.read_middleware() == MiddlewareBlock(waiting=(1, 2, 3))
    assert reader.read_scheduler() == engine
    assert reader.read_cap(0) is None
    assert reader.read_cap(1) == CapBlock(armed=True, fraction=0.8)


def test_caps_are_armed_only_when_every_rank_says_so(path: Path) -> None:
    """One worker without its cap keeps the pod from turning ready."""
    region = Region.create(path, ranks=2)
    assert not region.caps_armed()
    region.write_cap(0, CapBlock(armed=True))
    assert not region.caps_armed()
    region.write_cap(1, CapBlock(armed=True))
    assert region.caps_armed()
    with pytest.raises(ValueError, match="there is no rank 2"):
        region.write_cap(2, CapBlock(armed=True))


def test_a_new_region_is_empty_private_and_leaves_the_old_one_to_its_processes(path: Path) -> None:
    """A process of an earlier start cannot write into the new start's region."""
    old = Region.create(path)
    old.write_supervisor(SupervisorBlock(generation=1))
    new = Region.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert new.nonce != old.nonce
    assert new.read_supervisor() is None
    old.write_supervisor(SupervisorBlock(generation=2))
    assert new.read_supervisor() is None
    assert [entry.name for entry in path.parent.iterdir()] == ["region"]


def test_bytes_of_another_start_or_place_are_not_taken(path: Path) -> None:
    """The checksum covers the nonce, the block's place and its sequence number."""
    place, other = places(1)[0], places(1)[1]
    payload = SUPERVISOR.pack(SupervisorBlock(generation=5))
    slot = seal(1, place, 4, payload)
    assert unseal(1, place, slot) == (4, payload)
    assert unseal(2, place, slot) is None
    assert unseal(1, replace(place, offset=other.offset), slot) is None


@given(st.data())
def test_a_slot_with_any_changed_byte_is_not_taken(data: st.DataObject) -> None:
    """Torn or damaged bytes give None, never another value."""
    place = places(1)[0]
    slot = bytearray(seal(9, place, 12, SUPERVISOR.pack(SupervisorBlock(generation=5))))
    number = data.draw(st.integers(0, len(slot) - 1))
    slot[number] ^= data.draw(st.integers(1, 255))
    assert unseal(9, place, bytes(slot)) is None


def test_a_writer_that_dies_half_way_leaves_the_state_before(path: Path) -> None:
    """The two slots are written in turn, so one is always whole."""
    region = Region.create(path)
    region.write_supervisor(SupervisorBlock(generation=1))
    region.write_supervisor(SupervisorBlock(generation=2))
    place = places(1)[0]
    with path.open("r+b") as file:
        file.seek(place.slot(3))
        file.write(struct.pack("<QII", 3, place.payload, 0) + b"half")
    assert region.read_supervisor() == SupervisorBlock(generation=2)
    successor = Region.open(path)
    assert successor is not None
    successor.write_supervisor(SupervisorBlock(generation=4))
    assert region.read_supervisor() == SupervisorBlock(generation=4)


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 100_000])
def test_what_is_no_region_is_none(path: Path, content: bytes) -> None:
    """A missing, short or foreign file means start-up values, not a failure."""
    assert Region.open(path) is None
    path.write_bytes(content)
    assert Region.open(path) is None
    assert Region.of_environment({}) is None
    assert Region.of_environment({"FLEETKEEPER_SHARED_MEMORY": str(path)}) is None


def test_a_region_that_is_shorter_than_its_header_says_is_none(path: Path) -> None:
    """A truncated file would otherwise end the reader with SIGBUS."""
    path.write_bytes(pack_header(1, 1) + bytes(64))
    assert Region.open(path) is None


def test_another_layout_version_is_not_read() -> None:
    """Two versions of the package in one pod do not misread one another."""
    header = bytearray(pack_header(1, 1))
    assert unpack_header(bytes(header)) == (1, 1)
    header[8] += 1
    assert unpack_header(bytes(header)) is None


def test_cells_and_blocks_are_the_same_bytes(path: Path) -> None:
    """What the hot path changes in place is what the typed block shows."""
    region = Region.create(path)
    cells = Cells(SCHEDULER)
    cells.whole[SCHEDULER.cells["running"] + Tier.BATCH] = 5
    cells.real[SCHEDULER.cells["batch_time_sum"]] = 1.5
    region.publish(cells)
    assert region.read_scheduler() == SchedulerBlock(running=(0, 0, 5), batch_time_sum=1.5)


@pytest.mark.parametrize(
    "edges", [QUEUE_WAIT_EDGES_S, BATCH_TIME_EDGES_S, BATCH_SEQUENCES_EDGES, BATCH_TOKENS_EDGES]
)
def test_edges_rise_by_at_most_a_quarter(edges: tuple[float, ...]) -> None:
    """Means and shares read from buckets are at most 25% coarse; counts below 5 step by one."""
    for low, high in pairwise(edges):
        assert low < high
        assert high <= low * MAX_RATIO * 1.001 or high - low == 1


def test_edges_span_what_is_promised_and_hold_round_objectives() -> None:
    """An objective of 50 ms or 500 ms is an edge, so snapping it down changes nothing."""
    assert (QUEUE_WAIT_EDGES_S[0], QUEUE_WAIT_EDGES_S[-1]) == (0.005, 60.0)
    assert (BATCH_TIME_EDGES_S[0], BATCH_TIME_EDGES_S[-1]) == (0.001, 10.0)
    for objective in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
        assert objective in BATCH_TIME_EDGES_S
        assert objective in QUEUE_WAIT_EDGES_S


@pytest.mark.parametrize(
    ("edges", "lowest", "highest"),
    [(TIME_TO_FIRST_TOKEN_EDGES_S, 0.01, 60.0), (INTER_TOKEN_LATENCY_EDGES_S, 0.001, 2.5)],
)
def test_edges_of_latencies_rise_by_at_most_half_and_hold_common_slos(
    edges: tuple[float, ...], lowest: float, highest: float
) -> None:
    """An SLO of 2 s to the first token, or of 50 ms between two, is counted exactly."""
    assert (edges[0], edges[-1]) == (lowest, highest)
    assert all(low < high <= low * MAX_LATENCY_RATIO * 1.001 for low, high in pairwise(edges))
    slos = (0.02, 0.025, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
    assert [slo for slo in slos if lowest <= slo <= highest and slo not in edges] == []


def test_products_of_a_step_fit_their_names() -> None:
    """Each term `a_b` is a*b of the same step."""
    values = dict(zip(TERMS, products(3.0, 5.0, 7.0, 0.5), strict=True))
    singles = {"prefill": 3.0, "sequences": 5.0, "kv": 7.0, "seconds": 0.5}
    assert values["steps"] == 1.0
    for term, value in values.items():
        if "_" in term:
            left, right = term.split("_")
            assert value == singles[left] * singles[right]


WRITES, MORE_WRITES = 50_000, 500_000


def _write(path: str, started: Any, writes: int) -> None:
    region = Region.open(path)
    assert region is not None
    cells = Cells(SCHEDULER)
    started.wait()
    for number in range(1, writes + 1):
        # Every cell carries the same number: a torn copy would show two.
        if number % 7 == 0:
            for place in range(len(cells.whole)):
                cells.whole[place] = number
        region.heartbeat.whole[HEARTBEAT.cells["tokens"]] = number << 32 | number
        cells.whole[0] = cells.whole[1] = cells.whole[len(cells.whole) - 1] = number
        region.publish(cells)
    os._exit(0)


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize("writes", [WRITES, MORE_WRITES])
def test_a_million_operations_by_three_processes_tear_nothing(path: Path, writes: int) -> None:
    """As many raw and typed reads as writes, or more: each read is one write's, whole. A million with 500,000."""
    region = Region.create(path)
    place = places(1)[2]
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    writer = context.Process(target=_write, args=(str(path), started, writes))
    reads = context.Value("q", 0)
    other = context.Process(target=_read_until, args=(str(path), started, reads, writes))
    for process in (writer, other):
        process.start()
    started.set()
    done, last = 0, 0
    while writer.is_alive() or done + reads.value < writes:
        for _ in range(200):
            last = max(last, _whole_number(region, place, last))
        done += 200
    for process in (writer, other):
        process.join(60)
    assert (writer.exitcode, other.exitcode) == (0, 0)
    assert done + reads.value >= writes
    assert _whole_number(region, place, last) == writes


def _read_until(path: str, started: Any, reads: Any, writes: int) -> None:
    region = Region.open(path)
    assert region is not None
    place = places(1)[2]
    started.wait()
    done, last = 0, 0
    while last < writes:
        last = max(last, _whole_number(region, place, last))
        done += 1
        if done % 200 == 0:
            reads.value = done
    reads.value = done
    os._exit(0)


def _whole_number(region: Region, place: Any, last: int) -> int:
    """The number a read shows in its first, second and last cell; never an older one than seen."""
    payload = region.read_payload(2)
    if payload is None:
        assert last == 0
        return 0
    first, second = struct.unpack_from("<QQ", payload)
    (end,) = struct.unpack_from("<Q", payload, place.payload - 8)
    assert first == second == end
    assert first >= last
    middle = set(struct.unpack_from("<100Q", payload, 16))
    assert middle == {first - first % 7}
    high, low = divmod(region.read_heartbeat().tokens, 1 << 32)
    assert high == low >= first, "a cell of the heartbeat is stored at once, and before the block"
    return int(first)
