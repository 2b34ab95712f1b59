"""Parts of a log: what was written is read, and what is damaged is known."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.model import Attempt, Result, Trouble
from fleetkeeper_gateway.batch.storage import part as parts

_RESULTS = st.lists(
    st.builds(
        lambda line, outcome, text: Result(
            line, outcome == parts.OK, text, outcome != parts.DID_NOT_RUN
        ),
        line=st.integers(0, 2**32 - 1),
        outcome=st.integers(0, 2),
        text=st.binary(max_size=200),
    ),
    max_size=8,
    unique_by=lambda one: one.line,
)
_ATTEMPTS = st.lists(st.builds(Attempt, st.integers(0, 2**32 - 1), st.sampled_from(Trouble)))


@given(_RESULTS, _ATTEMPTS, st.booleans())
def test_a_part_is_read_as_it_was_written(
    results: list[Result], attempts: list[Attempt], closing: bool
) -> None:
    content = parts.encode(results, attempts, closing=closing)
    found = parts.decode(content)
    assert found.attempts == attempts
    texts = {line: content[one.offset : one.offset + one.size] for line, one in found.entries}
    read = [one.result(line, texts[line]) for line, one in found.entries]
    assert read == sorted(results, key=lambda one: one.line)
    assert len(content) == parts.size_without(len(attempts)) + sum(map(parts.size_of, results))
    head = parts.decode_head(content[: parts.HEAD_BYTES], len(content))
    assert head == found.head
    assert (head.closing, head.attempts) == (closing, len(attempts))
    assert (head.ok, head.failed) == (
        sum(one.ok for one in results),
        sum(one.ran and not one.ok for one in results),
    )
    # Nobody reads this one; its place stays.
    assert struct.unpack_from("<I", content, 13) == (sum(not one.ran for one in results),)


@given(_RESULTS, st.data())
def test_a_part_that_is_cut_or_changed_is_damaged(
    results: list[Result], data: st.DataObject
) -> None:
    content = parts.encode(results, [Attempt(1, Trouble.KILLED)], closing=True)
    at = data.draw(st.integers(0, len(content) - 1))
    changed = content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]
    for bad in (content[:at], changed, content[:at] + bytes(len(content) - at) + b"x"):
        with pytest.raises(parts.DamagedPart):
            parts.decode(bad)
    with pytest.raises(parts.DamagedPart):
        parts.decode_head(content[: parts.HEAD_BYTES], len(content) - 1)
    with pytest.raises(parts.DamagedPart):
        parts.decode(bytes(at))  # zeros
    if at < parts.HEAD_BYTES:
        with pytest.raises((parts.DamagedPart, parts.UnknownPart)):
            parts.decode_head(changed, len(changed))


def test_a_part_of_a_later_version_is_not_damaged() -> None:
    """It is left as it is: after an upgrade is taken back, its results must not be lost."""
    content = b"FKC2 something that is not known here, of any length"
    whole = content + struct.pack("<I", crc32(content))
    with pytest.raises(parts.UnknownPart, match="FKC2"):
        parts.decode(whole)
    with pytest.raises(parts.UnknownPart):
        parts.decode_head(whole, len(whole))
