"""The audit log: one line of JSON for each event, with every field, and nothing that is not one."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.audit import create_audit_log
from fleetkeeper_gateway.audit.log import TEXT_LIMIT

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
