"""Lines of files: what is sent, what an answer means, and what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetkeeper_gateway.batch.interfaces import Answer, NotAnswered
from fleetkeeper_gateway.batch.model import Status
from fleetkeeper_gateway.batch.workers.lines import (
    Verdict,
    answered_line,
    failed_line,
    judge,
    parse_request,
    unfinished_line,
)
from tests.gateway.batch.workers.world import batch_record

BATCH = batch_record()
LIMIT = {"error": {"code": "rate_limit_exceeded", "type": "rate_limit_error"}}


def answer(status: int, body: bytes = b"{}", refused: str | None = None) -> Answer:
    return Answer(status, body, "r-1", refused=refused)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (answer(200), Verdict.OK),
        (answer(201), Verdict.OK),
        (answer(200, b"no JSON"), Verdict.FAILED),
        (answer(200, b'{"a": NaN}'), Verdict.FAILED),
        (answer(200, b'{"a": -1e999}'), Verdict.FAILED),
        (answer(200, b"[" * 100_000), Verdict.FAILED),
        (answer(302), Verdict.ERROR),
        (answer(400), Verdict.ERROR),
        (answer(401), Verdict.REFUSED),
        (answer(401, refused="invalid_api_key"), Verdict.KEY_REFUSED),
        (answer(403), Verdict.ERROR),
        (answer(404, b"not found"), Verdict.ERROR),
        (answer(429), Verdict.REFUSED),
        (answer(429, b'{"error": {"code": "queue_full"}}'), Verdict.REFUSED),
        (answer(429, json.dumps(LIMIT).encode()), Verdict.REFUSED),
        (answer(429, refused="bodies_full"), Verdict.REFUSED),
        (answer(429, refused="rate_limit_exceeded"), Verdict.KEY_REFUSED),
        (answer(500), Verdict.FAILED),
        (answer(502), Verdict.FAILED),
        (answer(503), Verdict.REFUSED),
        (answer(504), Verdict.FAILED),
    ],
)
def test_what_an_answer_means(found: Answer, verdict: Verdict) -> None:
    assert judge(found) is verdict


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "messages": [{"role": "user", "content": "grüße \u2028 \x85 日本"}]},
        {"model": "m", "prompt": "half a pair \ud800"},
        {"model": "m", "n": 10**30, "temperature": 1e-7},
    ],
)
def test_the_body_of_a_line_is_sent_as_it_is(body: dict[str, Any]) -> None:
    line = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/x", "body": body})
    request = parse_request(line.encode())
    assert request.custom_id == "x"
    assert json.loads(request.body) == body


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b'{"custom_id": "x"}', b"\xff"])
def test_what_is_no_request_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(line)


def test_a_line_of_the_output_file_is_as_openai_has_it() -> None:
    text = answered_line(BATCH, 7, "c-7", answer(200, b'{"a":\n "\\u2028"}'))
    assert len(text.decode().splitlines()) == 1, "whatever counts as the end of a line"
    found = json.loads(text)
    assert found.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "r-1", "body": {"a": "\u2028"}}
    assert found == {"custom_id": "c-7", "response": response, "error": None}


def test_ids_are_those_of_the_line() -> None:
    def identity(number: int, batch: int = 0) -> str:
        line = answered_line(batch_record(batch), number, "same", answer(200))
        return str(json.loads(line)["id"])

    assert identity(1) == identity(1)
    assert len({identity(1), identity(2), identity(1, 1)}) == 3


def test_an_answer_that_is_no_json_is_kept_as_text() -> None:
    found = json.loads(answered_line(BATCH, 0, "c", answer(404, b"not \xff found")))
    assert found["response"]["body"] == "not \ufffd found"


def test_a_number_that_no_float_holds_does_not_make_a_line_that_is_no_json() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = answered_line(BATCH, 0, "a", answer(400, b'{"a": 1e999}'))
    assert json.loads(line, parse_constant=refuse)["response"]["body"] == '{"a": 1e999}'


def test_a_line_without_an_answer_says_why() -> None:
    broken = NotAnswered("the connection broke (ServerDisconnectedError)", sent=True)
    for last in (broken, answer(502, b"x" * 10_000)):
        found = json.loads(failed_line(BATCH, 0, "c", 5, last))
        assert found["response"] is None
        assert found["error"]["code"] == "engine_failed"
        assert found["error"]["message"].startswith("5 attempts ended without an answer.")
        assert len(found["error"]["message"]) <= 500


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.EXPIRED])
def test_a_line_that_did_not_run_says_so(status: Status) -> None:
    found = json.loads(unfinished_line(BATCH, 0, "c", status))
    assert (found["custom_id"], found["response"]) == ("c", None)
    assert found["error"]["code"] == f"batch_{status.value}"
