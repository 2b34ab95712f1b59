"""Lines of input, output and error files, as OpenAI has them. Pure."""

from __future__ import annotations

import enum
import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from fleetkeeper_gateway.batch.interfaces import Answer, NotAnswered
from fleetkeeper_gateway.batch.model import BatchRecord, Status

KEY_LIMIT: Final = "rate_limit_exceeded"
"""The gateway's mark of a 429 when a limit of the key is reached: requests of other keys may pass."""
_MOST_WORDS: Final = 500


@dataclass(frozen=True, slots=True)
class Request:
    """A line of an input file."""

    custom_id: str
    body: bytes
    """JSON, as it is sent."""


class Verdict(enum.Enum):
    """What an attempt means for its line."""

    OK = "ok"
    """The output file gets the answer."""
    ERROR = "error"
    """The error file gets the answer: another attempt would get the same."""
    FAILED = "failed"
    """An engine may have worked on it and gave no proper answer. It counts as an attempt."""
    REFUSED = "refused"
    """Nothing worked on it, and it may be sent again."""
    KEY_REFUSED = "key_refused"
    """The same, because of its key: a limit, or it is not accepted."""


def parse_request(line: bytes) -> Request:
    """Return what a validated line asks for.

    Raises:
        ValueError: if it is no such line.
    """
    found = json.loads(line)
    try:
        return Request(str(found["custom_id"]), _encoded(found["body"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"a line of the input file is no request: {error!r}") from error


def judge(answer: Answer) -> Verdict:
    """Return what an answer means.

    Only the gateway can say something about the key. A service that answers as the gateway does
    speaks for itself.
    """
    if answer.status == 429:
        return Verdict.KEY_REFUSED if answer.refused == KEY_LIMIT else Verdict.REFUSED
    if answer.status == 401:
        # It is about who asks, not about the line: a key was revoked, clocks differ, or a Secret with
        # keys has not reached every pod yet.
        return Verdict.REFUSED if answer.refused is None else Verdict.KEY_REFUSED
    if answer.status == 503:
        return Verdict.REFUSED
    if answer.status >= 500:
        return Verdict.FAILED
    if 200 <= answer.status < 300:
        return Verdict.OK if _parsed(answer.body) is not None else Verdict.FAILED
    return Verdict.ERROR


def answered_line(batch: BatchRecord, line: int, custom_id: str, answer: Answer) -> bytes:
    """Return the line of the output or error file for an answer."""
    body = _parsed(answer.body)
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": answer.body.decode(errors="replace") if body is None else body,
    }
    return _line(batch, line, custom_id, response=response)


def failed_line(
    batch: BatchRecord, line: int, custom_id: str, attempts: int, last: Answer | NotAnswered
) -> bytes:
    """Return the line of the error file for a line that no engine answered."""
    if isinstance(last, Answer):
        why = f"status {last.status}: {last.body[:_MOST_WORDS].decode(errors='replace')}"
    else:
        why = str(last)
    error = {
        "code": "engine_failed",
        "message": f"{attempts} attempts ended without an answer. The last one: {why}"[
            :_MOST_WORDS
        ],
    }
    return _line(batch, line, custom_id, error=error)


def unfinished_line(batch: BatchRecord, line: int, custom_id: str, status: Status) -> bytes:
    """Return the line of the error file for a line that did not run before its batch ended."""
    messages = {
        Status.EXPIRED: "This request could not be executed before the completion window expired.",
        Status.CANCELLED: "This request was not executed because the batch was cancelled.",
        Status.FAILED: "This request was not executed because the store of batches is damaged: nothing "
        "tells any more where its line is. Create the batch again.",
    }
    error = {"code": f"batch_{status.value}", "message": messages[status]}
    return _line(batch, line, custom_id, error=error)


def _line(
    batch: BatchRecord,
    line: int,
    custom_id: str,
    *,
    response: dict[str, Any] | None = None,
    error: dict[str, str] | None = None,
) -> bytes:
    identity = hashlib.sha256(f"{batch.id}/{line}".encode()).hexdigest()[:32]
    found = {
        "id": f"batch_req_{identity}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    # ASCII: some readers take U+2028 and others for the end of a line.
    return json.dumps(found, separators=(",", ":")).encode()


def _encoded(body: object) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # Half a surrogate pair: JSON can name it, and UTF-8 cannot hold it.
        return json.dumps(body, separators=(",", ":")).encode()


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        # Python would write it as Infinity, which is not JSON.
        raise ValueError(f"no number holds {text[:20]}")
    return found


def _parsed(body: bytes) -> object:
    """Return JSON as Python has it; None if it is not JSON, or has a number that Python has not."""
    found: object = None
    with suppress(ValueError, RecursionError):
        found = json.loads(body, parse_constant=_not_json, parse_float=_finite)
    return found
