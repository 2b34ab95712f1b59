"""The audit log: one line of JSON for each event, with every field, and nothing that is not one."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.audit import StructuredAuditLog, create_audit_log
from fleetkeeper_gateway.audit.log import MAX_ADDRESSES, TEXT_LIMIT

TEXTS = st.none() | st.text()


@pytest.mark.promise("logs-without-content")
@given(key=TEXTS, request=st.text(), model=TEXTS, service=TEXTS, client=st.text())
def test_each_use_is_one_line(
    key: str | None, request: str, model: str | None, service: str | None, client: str
) -> None:
    stream = io.StringIO()
    create_audit_log(stream).request(
        key_id=key,
        request_id=request,
        service=service,
        model=model,
        tier="batch",
        outcome="ok",
        status=200,
        client=client,
    )
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "event": "audit",
        "action": "request",
        "key": key,
        "request": request,
        "service": service,
        "model": model,
        "tier": "batch",
        "outcome": "ok",
        "status": 200,
        "client": client,
    }


def test_a_change_is_one_line() -> None:
    stream = io.StringIO()
    create_audit_log(stream).change(key_id="chat", change="rotated", actor=None)
    found = json.loads(stream.getvalue())
    found.pop("time")
    assert found == {"event": "audit", "action": "rotated", "key": "chat", "actor": None}


def unknown(log: StructuredAuditLog, client: str, number: int) -> None:
    """Record a request without a key."""
    log.request(
        key_id=None,
        request_id=f"r-{number}",
        service=None,
        model=None,
        tier=None,
        outcome="missing_api_key",
        status=401,
        client=client,
    )


async def test_requests_without_a_key_are_counted_by_address() -> None:
    """Anybody could push the lines of others out of the log otherwise."""
    stream = io.StringIO()
    log = create_audit_log(stream)
    for number in range(1000):
        unknown(log, "10.0.0.1", number)
    unknown(log, "10.0.0.2", 1000)
    log.request(
        key_id="chat",
        request_id="r",
        service=None,
        model=None,
        tier=None,
        outcome="ok",
        status=200,
        client="10.0.0.1",
    )
    log.flush()
    log.flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    found = [(line["client"], line.get("request"), line.get("count")) for line in lines]
    assert found == [
        ("10.0.0.1", "r-0", None),
        ("10.0.0.2", "r-1000", None),
        ("10.0.0.1", "r", None),
        ("10.0.0.1", None, 999),
    ]
    unknown(log, "10.0.0.1", 1001)
    assert len(stream.getvalue().splitlines()) == 5, "another second begins"
    log.flush()


async def test_many_addresses_have_few_lines_and_none_is_lost() -> None:
    stream = io.StringIO()
    log = create_audit_log(stream)
    for number in range(10_000):
        unknown(log, f"fd00::{number:x}", number)
    log.flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == MAX_ADDRESSES + 1
    assert sum(line.get("count", 1) for line in lines) == 10_000
    assert lines[-1]["client"] is None


async def test_what_was_counted_is_written_after_a_second() -> None:
    stream = io.StringIO()
    log = create_audit_log(stream)
    for number in range(3):
        unknown(log, "10.0.0.1", number)
    async with asyncio.timeout(60):
        while len(stream.getvalue().splitlines()) < 2:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.05)
    assert json.loads(stream.getvalue().splitlines()[1])["count"] == 2


def test_what_a_client_chose_is_cut() -> None:
    stream = io.StringIO()
    create_audit_log(stream).request(
        key_id=None,
        request_id="r",
        service=None,
        model="m" * 10**6,
        tier=None,
        outcome="unknown_model",
        status=404,
        client="10.0.0.1",
    )
    assert len(json.loads(stream.getvalue())["model"]) == TEXT_LIMIT
