"""Batches and lines as scripts take and return them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields

from fleetkeeper_gateway.batch.interfaces import Taken
from fleetkeeper_gateway.batch.model import BatchRecord, LineRef, Validated
from fleetkeeper_gateway.batch.queue.names import class_of, fence_base
from fleetkeeper_gateway.limits.pipe import Arguments

Answer = list[bytes | int | list[bytes | int]]
"""Of a script. The first value is a tick, or -1 for a refusal."""
_TAKEN = 6
"""Values of one line in the answer of take.lua."""


def batch_arguments(record: BatchRecord, validated: Validated) -> Arguments:
    """Return what scripts need to create a batch: ID, model, owner, class, expires, total, record."""
    text = json.dumps(asdict(record), separators=(",", ":"))
    return (
        record.id,
        validated.model,
        record.key_id,
        class_of(record.expires),
        record.expires,
        validated.lines,
        text,
    )


def record_of(text: str) -> BatchRecord:
    """Return the record of a batch that Redis kept. Fields that this version does not know are ignored."""
    kept = json.loads(text)
    return BatchRecord(
        **{one.name: kept[one.name] for one in fields(BatchRecord) if one.name in kept}
    )


def line_arguments(lines: Iterable[LineRef]) -> Arguments:
    """Return number, offset and length of each line."""
    return tuple(value for line in lines for value in (line.number, line.offset, line.length))


def taken_of(record: BatchRecord, block: Sequence[bytes | int], epoch: int) -> Iterator[Taken]:
    """Return the lines in one block of the answer of take.lua."""
    model = as_text(block[1])
    for index in range(2, len(block), _TAKEN):
        entry, line, offset, length, attempt, number = block[index : index + _TAKEN]
        yield Taken(
            batch=record,
            line=LineRef(int(line), int(offset), int(length)),
            attempt=int(attempt),
            fence=fence_base(epoch) + int(number),
            entry=as_text(entry),
            model=model,
        )


def as_answer(value: object) -> Answer:
    """Return what a script answered, which is a list."""
    if not isinstance(value, list):
        raise TypeError(f"a script answered {value!r}, not a list")
    return value


def as_list(value: bytes | int | list[bytes | int]) -> list[bytes | int]:
    """Return a value of an answer that is a list."""
    if not isinstance(value, list):
        raise TypeError(f"a script answered {value!r}, not a list")
    return value


def as_number(value: bytes | int | list[bytes | int]) -> int:
    """Return a value of an answer that is a number."""
    if not isinstance(value, int):
        raise TypeError(f"a script answered {value!r}, not a number")
    return value


def as_text(value: bytes | int | list[bytes | int]) -> str:
    """Return a value of an answer that is text."""
    if not isinstance(value, bytes):
        raise TypeError(f"a script answered {value!r}, not text")
    return value.decode()
