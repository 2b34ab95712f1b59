"""Lines of input, output and error files in OpenAI's format. Pure."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from fleetkeeper_gateway.batch.interfaces import Answer, AnswerTooLarge, NotAnswered
from fleetkeeper_gateway.batch.model import BatchRecord, Status
from fleetkeeper_gateway.batch.workers.json_text import is_json

KEY_LIMIT: Final = "rate_limit_exceeded"
"""Code of the gateway's 429 when a limit of the key is reached. Requests of other keys may still pass."""
SERVICE_ASLEEP: Final = "service_asleep"
"""Code of the gateway's 503 for a service that sleeps, wakes up or swaps."""
_NOT_NOW: Final = frozenset({401, 429, 503})
"""Statuses that are not caused by the line."""
_MAX_WORDS: Final = 500
_MAX_TEXT: Final = 1_048_576
"""Maximum bytes of an answer that is not JSON, which is kept as text."""
_MARKS = re.compile(rb'"[^"]*"|[{}\[\]]')
_COLON = re.compile(rb"[ \t\r]*:")
_ENDS_OF_LINES: Final = (("\u2028", b"\\u2028"), ("\u2029", b"\\u2029"), ("\x85", b"\\u0085"))
"""Characters that some readers treat as the end of a line, and their JSON escapes."""


@dataclass(frozen=True, slots=True)
class Request:
    """A line of an input file."""

    custom_id: str
    body: bytes
    """The JSON that is sent."""


class Verdict(enum.Enum):
    """The consequence of an attempt for its line."""

    OK = "ok"
    """The answer goes to the output file."""
    ERROR = "error"
    """The answer goes to the error file: a further attempt would get the same."""
    FAILED = "failed"
    """An engine may have worked on the line and gave no proper answer. Counts as an attempt."""
    REFUSED = "refused"
    """No engine worked on the line. It is sent again."""
    KEY_REFUSED = "key_refused"
    """As REFUSED, because of the key: a limit is reached, or the key is not accepted."""
    ASLEEP = "asleep"
    """As REFUSED, because the service sleeps, wakes up or swaps."""


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


_decode_line = msgspec.json.Decoder(_Line).decode


def parse_request(line: bytes) -> Request:
    """Parse a validated line. The bytes of its body are sent unchanged.

    Raises:
        ValueError: if the line is not valid.
    """
    try:
        found = _decode_line(line)
    except (msgspec.DecodeError, RecursionError):
        return _scanned(line)
    return Request(found.custom_id, bytes(found.body))


def _scanned(line: bytes) -> Request:
    """Parse a line that msgspec refuses because of a lone surrogate. This takes 100 times as long."""
    depth = began = 0
    name, custom_id, body = "", None, None
    # The same length, and each quote begins or ends a text.
    plain = line.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    for mark in _MARKS.finditer(plain):
        first = line[mark.start()]
        if first in b"}]":
            depth -= 1
            if depth == 1 and name == "body":
                body = line[began : mark.end()]
        elif first in b"{[":
            depth += 1
            began = mark.start() if depth == 2 else began
        elif depth == 1 and _COLON.match(line, mark.end()):
            name = json.loads(line[mark.start() : mark.end()])
        elif depth == 1 and name == "custom_id":
            custom_id = str(json.loads(line[mark.start() : mark.end()]))
    if depth or custom_id is None or body is None:
        raise ValueError("a line of the input file is no request")
    return Request(custom_id, body)


def judge(answer: Answer | NotAnswered) -> Verdict:
    """Return the verdict of an answer, or of a missing answer.

    Only the gateway's own refusals concern the key. The same answer from a service concerns that service.
    """
    if isinstance(answer, AnswerTooLarge):
        return Verdict.ERROR
    if isinstance(answer, NotAnswered):
        return Verdict.FAILED if answer.sent else Verdict.REFUSED
    if answer.status in _NOT_NOW:
        return _not_now(answer)
    if not is_kept(answer.status):
        return Verdict.FAILED
    if answer.status < 300:
        return Verdict.OK if is_json(answer.body) else Verdict.FAILED
    return Verdict.ERROR


def _not_now(answer: Answer) -> Verdict:
    if answer.status == 503:
        return Verdict.ASLEEP if answer.refused == SERVICE_ASLEEP else Verdict.REFUSED
    # 401 concerns the sender, not the line: a key was revoked, clocks differ, or a Secret with keys has
    # not reached every pod yet.
    is_of_key = answer.refused == KEY_LIMIT if answer.status == 429 else answer.refused
    return Verdict.KEY_REFUSED if is_of_key else Verdict.REFUSED


def is_kept(status: int) -> bool:
    """Return whether an answer with a status is the result of its line."""
    return status < 500 and status not in _NOT_NOW


def answered_line(
    batch: BatchRecord, line: int, custom_id: str, answer: Answer, *, is_valid: bool
) -> bytes:
    """Return the line of the output or error file for an answer. The bytes of JSON are kept.

    `is_valid`: the answer is known to be JSON.
    """
    body = answer.body
    if is_valid or is_json(body):
        # JSON allows these characters outside of texts, but not within.
        body = body.replace(b"\n", b" ").replace(b"\r", b" ")
        for character, escape in _ENDS_OF_LINES:
            body = body.replace(character.encode(), escape)
    else:
        body = _json(body[:_MAX_TEXT].decode(errors="replace"))
    head = b'{"status_code":%d,"request_id":%b,"body":' % (answer.status, _json(answer.request_id))
    return _line(batch, line, custom_id, response=head + body + b"}")


def too_large_line(batch: BatchRecord, line: int, custom_id: str, most: int) -> bytes:
    """Return the line of the error file for an answer above the maximum size."""
    why = f"The answer has more than {most} bytes, the most that a batch keeps. Ask for less in one line."
    return _failure(batch, line, custom_id, "answer_too_large", why)


def failed_line(
    batch: BatchRecord, line: int, custom_id: str, attempts: int, last: Answer | NotAnswered | str
) -> bytes:
    """Return the line of the error file for a line that no engine answered."""
    if isinstance(last, Answer):
        why = f"status {last.status}: {last.body[:_MAX_WORDS].decode(errors='replace')}"
    else:
        why = str(last)
    message = f"{attempts} attempts ended without an answer. The last one: {why}"
    return _failure(batch, line, custom_id, "engine_failed", message[:_MAX_WORDS])


def unfinished_line(batch: BatchRecord, line: int, custom_id: str, status: Status) -> bytes:
    """Return the line of the error file for a line that did not run before its batch ended."""
    messages = {
        Status.EXPIRED: "This request could not be executed before the completion window expired.",
        Status.CANCELLED: "This request was not executed because the batch was cancelled.",
        Status.FAILED: "This request was not executed because the store of batches is damaged: it is "
        "not known any more where its line is. Create the batch again.",
    }
    return _failure(batch, line, custom_id, f"batch_{status.value}", messages[status])


def _failure(batch: BatchRecord, line: int, custom_id: str, code: str, message: str) -> bytes:
    return _line(batch, line, custom_id, error={"code": code, "message": message})


def lost_line(batch: BatchRecord, line: int, custom_id: str) -> bytes:
    """Return the line of the error file for a line whose written result is damaged."""
    message = "The result of this request was damaged in the store of batches. Send it again."
    return _line(batch, line, custom_id, error={"code": "result_lost", "message": message})


def _line(
    batch: BatchRecord,
    line: int,
    custom_id: str,
    *,
    response: bytes = b"null",
    error: dict[str, str] | None = None,
) -> bytes:
    identity = hashlib.sha256(f"{batch.id}/{line}".encode()).hexdigest()[:32].encode()
    head = b'{"id":"batch_req_%b","custom_id":%b,"response":' % (identity, _json(custom_id))
    return b"".join((head, response, b',"error":', _json(error), b"}"))


def _json(value: object) -> bytes:
    # ASCII: see `_ENDS_OF_LINES`.
    return json.dumps(value, separators=(",", ":")).encode()
