"""Blocks of the memory that supervisor, middleware and scheduler share, and their cells. Pure.

A block is a table of 8-byte little-endian cells: its fields in their order, by type and length of
their defaults. A writer on a hot path can keep its block in one buffer and change single cells in
place (`Cells`). Times are seconds of CLOCK_MONOTONIC, which all processes of a pod share. A change
of a field's order, type or length requires a new `codec.VERSION`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Generic, TypeVar

from fleetkeeper_contract.histogram_buckets import (
    BATCH_SEQUENCES_EDGES,
    BATCH_TIME_EDGES_S,
    BATCH_TOKENS_EDGES,
    INTER_TOKEN_LATENCY_EDGES_S,
    QUEUE_WAIT_EDGES_S,
    TIME_TO_FIRST_TOKEN_EDGES_S,
)
from fleetkeeper_contract.step_terms import TERMS
from fleetkeeper_contract.tiers import TIERS, Tier


class Outcome(IntEnum):
    """The result of admission for a generation request. The number is its index in shared memory."""

    ADMITTED = 0
    QUEUE_FULL = 1
    TIER_CLOSED = 2
    DRAINING = 3
    CANCELLED = 4

    @property
    def label(self) -> str:
        """Return the value of the label `outcome`."""
        return self.name.lower()


class GrantRefusal(IntEnum):
    """The reason why a grant is refused. The number is its index in shared memory."""

    MISSING = 0
    INVALID = 1
    EXPIRED = 2
    USED = 3

    @property
    def label(self) -> str:
        """Return the value of the label `reason`."""
        return self.name.lower()


def _of_tier(buckets: tuple[int, ...], tier: Tier) -> tuple[int, ...]:
    width = len(buckets) // len(TIERS)
    return buckets[tier * width : (tier + 1) * width]


@dataclass(frozen=True, slots=True)
class SupervisorBlock:
    """The limits and states that the supervisor sets. Readers apply the lease themselves (`limits`)."""

    generation: int = 0
    """Generation of the last accepted PUT; 0 before the first."""
    sequences: int = 0
    """Requested sequences; 0 means the start-up value."""
    tokens: int = 0
    """Requested tokens of a step; 0 means the start-up value."""
    lease_deadline: float = 0.0
    """End of the limits lease. 0 means no lease: start-up values and the pod's own rule apply."""
    admit: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Share of arrivals that is admitted, by tier; 0 closes the tier."""
    shares: tuple[float, ...] = (1.0, 1.0, 0.0)
    """Maximum share of the sequences that a tier may hold while others wait; 0 means the start-up
    settings."""
    draining: bool = False
    drain_deadline: float = 0.0
    """While draining: when queued requests get 503 and running streams are ended."""
    cap_exceeded: bool = False
    """Memory is above its cap: no new sequence is scheduled until it is below."""
    closed: tuple[bool, ...] = (False, False, False)
    """Tiers closed by the pod itself, in addition to `admit`."""
    queue_limits: tuple[int, ...] = (0, 0, 0)
    """Maximum number of waiting requests, by tier."""
    batch_share_ratio: float = 0.0
    batch_floor_ratio: float = 0.0
    queue_wait_objective_s: float = 0.0
    """0 means that there is no policy (this and the three fields before it): start-up values apply."""
    written: float = 0.0
    """Time of this write."""


@dataclass(frozen=True, slots=True)
class MiddlewareBlock:
    """The requests in front of the engine. Tuples are by tier."""

    pid: int = 0
    generation: int = 0
    """Generation of the limits lease that was read last."""
    waiting: tuple[int, ...] = (0, 0, 0)
    """Requests in the queue."""
    waiting_sequences: tuple[int, ...] = (0, 0, 0)
    oldest_arrival: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Arrival of the oldest request in the queue; 0 means an empty queue."""
    released: tuple[int, ...] = (0, 0, 0)
    """Requests that were passed to vLLM and have not finished."""
    released_sequences: tuple[int, ...] = (0, 0, 0)
    arrivals: tuple[int, ...] = (0, 0, 0)
    """Distinct requests. The same X-Request-Id again within 60 s is a retry and is not counted."""
    arrivals_squared: tuple[int, ...] = (0, 0, 0)
    """Sum over finished 1 s bins of the square of their arrivals."""
    outcomes: tuple[int, ...] = (0,) * 15
    """Requests by tier and outcome: [5 * tier + outcome]."""
    unauthorized: int = 0
    """Requests refused because the API key was missing or wrong."""
    rejected: int = 0
    """Requests refused for an unknown tier or path or an unreadable body."""
    own_rule_closed: bool = False
    """Without a lease: the oldest wait is above the objective, so batch is closed."""
    time_to_first_token_buckets: tuple[int, ...] = (0,) * (
        3 * (len(TIME_TO_FIRST_TOKEN_EDGES_S) + 1)
    )
    """By tier, as the scheduler's queue wait. Streamed answers only."""
    time_to_first_token_sum: tuple[float, ...] = (0.0, 0.0, 0.0)
    inter_token_latency_buckets: tuple[int, ...] = (0,) * (
        3 * (len(INTER_TOKEN_LATENCY_EDGES_S) + 1)
    )
    inter_token_latency_sum: tuple[float, ...] = (0.0, 0.0, 0.0)
    grants_demanded: bool = False
    grants_refused: tuple[int, ...] = (0, 0, 0, 0)
    """Requests refused because of their grant, by `GrantRefusal`."""

    def time_to_first_token_of(self, tier: Tier) -> tuple[int, ...]:
        """Return the buckets of one tier's TTFT."""
        return _of_tier(self.time_to_first_token_buckets, tier)

    def inter_token_latency_of(self, tier: Tier) -> tuple[int, ...]:
        """Return the buckets of one tier's ITL."""
        return _of_tier(self.inter_token_latency_buckets, tier)


@dataclass(frozen=True, slots=True)
class SchedulerBlock:
    """The state and the counters of the engine. Counters start at 0 with the engine."""

    pid: int = 0
    supported: bool = False
    """The scheduler has the attributes that live limits need."""
    instrumentation_disabled: bool = False
    """Instrumentation disabled itself after a fault. The engine continues, and no value here
    changes any more."""
    generation: int = 0
    """Generation of the limits lease that was read last."""
    limit_sequences: int = 0
    """In force at the last schedule call that was counted."""
    limit_tokens: int = 0
    ceiling_sequences: int = 0
    """The start-up value."""
    ceiling_tokens: int = 0
    floor_sequences: int = 0
    floor_tokens: int = 0
    """The lowest limit that can be in force; without chunked prefill it is the ceiling."""
    worked_steps: int = 0
    """Steps with tokens whose output came back."""
    running: tuple[int, ...] = (0, 0, 0)
    """Sequences by tier. Refreshed every 200 ms, every 50 ms while any waits, and when none is left."""
    waiting: tuple[int, ...] = (0, 0, 0)
    """Sequences inside vLLM that no step has held yet, or that were preempted."""
    blocked: int = 0
    """Waiting sequences that are not runnable yet: their grammar compiles, or KV or input is still
    to come."""
    kv_capacity_tokens: int = 0
    kv_resident_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    """Prefill tokens computed."""
    generation_tokens: int = 0
    queue_wait_buckets: tuple[int, ...] = (0,) * (3 * (len(QUEUE_WAIT_EDGES_S) + 1))
    """By tier, one after the other. Not cumulative; the last bucket of each tier is above the
    highest edge."""
    queue_wait_sum: tuple[float, ...] = (0.0, 0.0, 0.0)
    batch_time_buckets: tuple[int, ...] = (0,) * (len(BATCH_TIME_EDGES_S) + 1)
    batch_time_sum: float = 0.0
    batch_sequences_buckets: tuple[int, ...] = (0,) * (len(BATCH_SEQUENCES_EDGES) + 1)
    batch_sequences_sum: float = 0.0
    batch_tokens_buckets: tuple[int, ...] = (0,) * (len(BATCH_TOKENS_EDGES) + 1)
    batch_tokens_sum: float = 0.0
    step_model: tuple[float, ...] = (0.0,) * (2 * len(TERMS))
    """Sums by step class, then by `step_terms.TERMS`."""

    def queue_wait_of(self, tier: Tier) -> tuple[int, ...]:
        """Return the buckets of one tier's queue wait."""
        return _of_tier(self.queue_wait_buckets, tier)


@dataclass(frozen=True, slots=True)
class HeartbeatBlock:
    """The heartbeat that the scheduler writes before each step, cell by cell, while the accelerator waits.

    Each cell is consistent by itself; two cells may be of two steps.
    """

    schedule_calls: int = 0
    steps: int = 0
    """Steps that were sent to the workers and whose output is not back."""
    tokens: int = 0
    """Tokens in these steps."""
    oldest_arrival: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Arrival (in the middleware) of the oldest request that waits in vLLM, by tier; 0 means none."""


@dataclass(frozen=True, slots=True)
class CapBlock:
    """The memory cap of one worker's allocator. There is one block for each rank."""

    pid: int = 0
    armed: bool = False
    """False if `non_torch_bytes` leave torch's allocator nothing below the cap."""
    own: bool = False
    """True if `non_torch_bytes` are of this process alone; False if they are of the whole device."""
    device: int = 0
    fraction: float = 0.0
    """Fraction of the device's memory that torch's allocator may take."""
    total_bytes: int = 0
    non_torch_bytes: int = 0
    """Memory in use outside the allocator when the cap was set."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    """The reserved memory that is not allocated is fragmentation: 1 - allocated / reserved."""
    written: float = 0.0

    def refusal(self, process_list: str) -> str:
        """Return why the cap is not armed. `process_list` names what lists a device's processes."""
        text = (
            f"{self.non_torch_bytes / 2**30:.2f} GiB of {self.total_bytes / 2**30:.2f} GiB are in use "
            "outside torch's allocator, which leaves it nothing below the cap"
        )
        if self.own:
            return text
        return f"{text}; other processes on device {self.device} count, because {process_list} does not list this one"

    @property
    def fragmentation_ratio(self) -> float:
        """Return the share of the reserved memory that is not allocated; 0 if nothing is reserved.

        The two values are read one after the other, and the allocator may free memory in between.
        The result is therefore clamped to 0.
        """
        if not self.reserved_bytes:
            return 0.0
        return max(0.0, 1 - self.allocated_bytes / self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """The start of one worker. There is one block for each rank."""

    loaded: float = 0.0
    """When its model was loaded."""


Block = TypeVar("Block")

_CODES = {int: "Q", float: "d", bool: "?"}
"""Types of cells: unsigned, float, boolean (stored like an unsigned number)."""


def _table_of(kind: type[Any]) -> Iterator[tuple[str, str, int]]:
    """Yield name, type and number of cells of each field, in the order of shared memory.

    The default value determines both: a tuple has one cell for each item.
    """
    for field in fields(kind):
        cells = field.default if isinstance(field.default, tuple) else (field.default,)
        yield field.name, _CODES[type(cells[0])], len(cells)


class Layout(Generic[Block]):
    """Converter between one kind of block and its bytes."""

    def __init__(self, kind: type[Block]) -> None:
        self.kind = kind
        self.table = tuple(_table_of(kind))
        codes = "".join(f"{count}{'Q' if code == '?' else code}" for _, code, count in self.table)
        self._struct = struct.Struct("<" + codes)
        self.size = self._struct.size
        self.cells: dict[str, int] = {}
        place = 0
        for name, _, count in self.table:
            self.cells[name] = place
            place += count

    def pack(self, block: Block) -> bytes:
        """Return the payload of a block.

        Raises:
            struct.error: if a value does not fit its cell or a tuple has the wrong length.
        """
        values: list[Any] = []
        for name, _, count in self.table:
            value = getattr(block, name)
            if count == 1:
                values.append(value)
            elif len(value) == count:
                values.extend(value)
            else:
                raise struct.error(f"{self.kind.__name__}.{name} holds {len(value)} of {count}")
        return self._struct.pack(*values)

    def unpack(self, payload: bytes) -> Block:
        """Return the block in a payload of exactly `size` bytes."""
        values = self._struct.unpack(payload)
        found: dict[str, Any] = {}
        place = 0
        for name, code, count in self.table:
            part = values[place : place + count]
            if code == "?":
                part = tuple(bool(value) for value in part)
            found[name] = part[0] if count == 1 else part
            place += count
        return self.kind(**found)


class Cells:
    """A block that its writer keeps in one buffer and changes cell by cell.

    `whole` and `real` are views of the same memory as unsigned numbers and as floats. The index of
    a field is `layout.cells[name]`. Changing a cell costs a store, publishing the block one CRC and
    one copy.
    """

    def __init__(self, layout: Layout[Any], memory: memoryview | None = None) -> None:
        """Use `memory` as it is, or allocate a buffer with default values."""
        self.layout = layout
        self.buffer = (
            memoryview(bytearray(layout.pack(layout.kind()))) if memory is None else memory
        )
        self.whole = self.buffer.cast("Q")
        self.real = self.buffer.cast("d")

    def clear(self) -> None:
        """Set all cells to 0."""
        self.buffer[:] = bytes(len(self.buffer))

    def release(self) -> None:
        """Release the views. The cells cannot be used afterwards."""
        for view in (self.whole, self.real, self.buffer):
            view.release()


SUPERVISOR = Layout(SupervisorBlock)
MIDDLEWARE = Layout(MiddlewareBlock)
SCHEDULER = Layout(SchedulerBlock)
HEARTBEAT = Layout(HeartbeatBlock)
CAP = Layout(CapBlock)
LOAD = Layout(LoadBlock)
