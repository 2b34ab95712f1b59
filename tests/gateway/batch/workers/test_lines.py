"""Lines of files: what is sent, what an answer means, and what is written."""

from __future__ import annotations

import io
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
    too_large_line,
    unfinished_line,
)
from tests.gateway.batch.workers.memory import batch_record

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
        (answer(200, b'{"a": -Infinity}'), Verdict.FAILED),
        (answer(200, b'{"a": -1e999}'), Verdict.OK),
        (answer(200, b'{"a": "\xff"}'), Verdict.FAILED),
        (answer(200, b"[" * 100_000), Verdict.FAILED),
        (answer(503, refused="rate_limit_exceeded"), Verdict.REFUSED),
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
        (answer(503, b'{"error": {"code": "service_asleep"}}'), Verdict.REFUSED),
        (answer(503, refused="service_asleep"), Verdict.ASLEEP),
        (answer(429, refused="service_asleep"), Verdict.REFUSED),
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
        {"model": "m", "custom_id": "not this", "body": {"custom_id": ["}", "]", '"', "\\"]}},
    ],
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_body_of_a_line_is_sent_as_it_is(body: dict[str, Any], *, is_ascii: bool) -> None:
    line = {"custom_id": 'x"{\\', "method": "POST", "url": "/v1/x", "body": body, "more": [{}]}
    for fields in (line, dict(reversed(line.items()))):
        text = json.dumps(fields, ensure_ascii=is_ascii).encode(errors="surrogatepass")
        request = parse_request(text)
        assert request.custom_id == 'x"{\\'
        assert request.body in text
        assert json.loads(request.body.decode(errors="surrogatepass")) == body


def test_a_number_that_no_float_holds_is_sent_as_it_is() -> None:
    """Python would print it as Infinity, which is not JSON."""
    line = b'{"custom_id":"x" , "body" : {"temperature" :1e999,"a":[ 1.10 ]} }'
    assert parse_request(line).body == b'{"temperature" :1e999,"a":[ 1.10 ]}'


def test_a_name_that_is_written_with_escapes_is_the_same_name() -> None:
    line = rb'{"\u0063ustom_id":"x","\u0062ody":{}}'
    assert (parse_request(line).custom_id, parse_request(line).body) == ("x", b"{}")


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"custom_id": "x"}', b"\xff", b'{"custom_id": "x", "body": {}']
)
def test_what_is_no_request_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(line)


def answered(found: Answer, *, is_valid: bool = True) -> bytes:
    return answered_line(BATCH, 7, "c-7", found, is_valid=is_valid)


def test_a_line_of_the_output_file_is_as_openai_has_it() -> None:
    text = answered(answer(200, b'{"a":\r\n "\\u2028"}'))
    assert b"\n" not in text
    found = json.loads(text)
    assert found.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "r-1", "body": {"a": "\u2028"}}
    assert found == {"custom_id": "c-7", "response": response, "error": None}


def test_the_bytes_of_an_answer_are_kept() -> None:
    """Numbers stay as the engine wrote them, also those that Python cannot hold."""
    body = '{"a": 1.10, "b":1E+400, "c": 12345678901234567890.5, "d": "\\u00e9é日本😀", "a": 2}'.encode()
    assert body in answered(answer(200, body))


def test_no_reader_takes_a_part_of_an_answer_for_the_end_of_a_line() -> None:
    value = "a\u2028b\u2029c\x85d"
    body = json.dumps({"text": value}, ensure_ascii=False).encode()
    text = answered(answer(200, body))
    assert json.loads(text)["response"]["body"] == {"text": value}
    file = text + b"\n" + text + b"\n"
    assert file.decode().splitlines() == [text.decode()] * 2, (
        "as httpx, and so the client of OpenAI"
    )
    assert file.splitlines() == [text] * 2
    assert list(io.TextIOWrapper(io.BytesIO(file))) == [text.decode() + "\n"] * 2


def test_ids_are_those_of_the_line() -> None:
    def identity(number: int, batch: int = 0) -> str:
        line = answered_line(batch_record(batch), number, "same", answer(200), is_valid=True)
        return str(json.loads(line)["id"])

    assert identity(1) == identity(1)
    assert len({identity(1), identity(2), identity(1, 1)}) == 3


def test_an_answer_that_is_no_json_is_kept_as_text() -> None:
    found = json.loads(answered(answer(404, b"not \xff found"), is_valid=False))
    assert found["response"]["body"] == "not \ufffd found"
    text = answered(answer(404, b"\0" * 8_388_608), is_valid=False)
    assert len(text) < 7_000_000, "escapes make it longer, so it is cut"


def test_an_error_that_is_json_is_kept_as_it_is() -> None:
    text = answered(answer(400, b'{"a": 1e999}'), is_valid=False)
    assert b'"body":{"a": 1e999}}' in text


def test_a_line_without_an_answer_says_why() -> None:
    broken = NotAnswered("the connection broke (ServerDisconnectedError)", sent=True)
    for last in (broken, answer(502, b"x" * 10_000)):
        found = json.loads(failed_line(BATCH, 0, "c", 5, last))
        assert found["response"] is None
        assert found["error"]["code"] == "engine_failed"
        assert found["error"]["message"].startswith("5 attempts ended without an answer.")
        assert len(found["error"]["message"]) <= 500


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (too_large_line(BATCH, 3, "c", 100), "answer_too_large"),
        (unfinished_line(BATCH, 0, "c", Status.CANCELLED), "batch_cancelled"),
        (unfinished_line(BATCH, 0, "c", Status.EXPIRED), "batch_expired"),
    ],
)
def test_a_line_that_has_no_answer_has_a_code(line: bytes, code: str) -> None:
    found = json.loads(line)
    assert (found["custom_id"], found["response"], found["error"]["code"]) == ("c", None, code)
