"""An attempt at a line: reads it, sends it, and decides what the answer means."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import (
    Answer,
    AnswerTooLarge,
    NotAnswered,
    ObjectMissing,
    Sender,
    StorageError,
)
from fleetkeeper_gateway.batch.model import (
    MAX_ATTEMPTS,
    MAX_KILLS,
    MAX_PART_BYTES,
    BatchRecord,
    LineRef,
    Result,
)
from fleetkeeper_gateway.batch.workers.handling import Handling
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.lines import (
    Verdict,
    answered_line,
    failed_line,
    judge,
    too_large_line,
)
from fleetkeeper_gateway.batch.workers.pace import Slot
from fleetkeeper_gateway.batch.workers.room import Room

log = structlog.get_logger(__name__)

BODY_BYTES: Final = 67_108_864
"""Maximum bytes of all lines of a process that are being read or sent."""
_SAY_S: Final = 60.0
MAX_REST_S: Final = 300.0
"""Maximum rest of a key, also if Retry-After is longer: the limit may have been raised."""
UNKNOWN_REST_S: Final = 30.0
"""Rest of a key that the upstream does not accept."""
_UNREAD_S: Final = 5.0
"""Rest of a key whose lines cannot be read from the store."""
_MAX_RESULT: Final = MAX_PART_BYTES - 65_536


class Tried(NamedTuple):
    """The counted attempts of a line."""

    failed: int
    killed: int

    @property
    def any(self) -> bool:
        """Return whether any attempt counts."""
        return self.failed > 0 or self.killed > 0


@dataclass(frozen=True, slots=True)
class GivenBack:
    """A line without a result, which is sent again."""

    attempt_counts: bool
    key_rests_s: float = 0.0
    """Seconds for which no line of its key is sent."""


class Attempts:
    """Makes attempts."""

    def __init__(
        self,
        inputs: Inputs,
        sender: Sender,
        handling: Handling,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inputs = inputs
        self._sender = sender
        self._handling = handling
        self._monotonic = monotonic
        self._bodies = Room(BODY_BYTES)
        self._said_at = -math.inf
        """Time of the last log line about lines that cannot be sent."""

    async def make(
        self, batch: BatchRecord, line: LineRef, tried: Tried, slot: Slot, wake: str | None
    ) -> Result | GivenBack:
        """Return the result of a line, or the reason for a further attempt.

        `wake` is the wake header of the line.
        """
        one = _Line(batch, line.number, tried, wake)
        try:
            async with self._bodies.hold(batch.key_id, line.length):
                return await self._make(one, line, slot)
        except ObjectMissing as error:
            log.error("the input file of a line is gone", batch=batch.id, error=str(error))  # noqa: TRY400
            metrics.LINES.labels("unread").inc()
            return one.failed("the input file is gone")
        except StorageError as error:
            metrics.STORE_FAILURES.labels("input").inc()
            metrics.LINES.labels("unread").inc()
            log.warning("line cannot be read", batch=batch.id, error=str(error))
            return GivenBack(attempt_counts=False, key_rests_s=_UNREAD_S)
        except MemoryError:
            # All lines of the process share its memory, so the error may not be caused by this line.
            log.exception(
                "no memory is left for a line; its key waits", batch=batch.id, line=line.number
            )
            metrics.LINES.labels("stopped").inc()
            return GivenBack(attempt_counts=False, key_rests_s=_UNREAD_S)
        except Exception:
            metrics.DEFECTS.labels("line").inc()
            log.exception("line failed", batch=batch.id, line=line.number)
            return one.failed("the line could not be processed")

    async def _make(self, one: _Line, line: LineRef, slot: Slot) -> Result | GivenBack:
        request = await self._inputs.request(one.batch, line)
        one.custom_id = request.custom_id
        if (result := one.over()) is not None:
            return result
        slot.sent(self._monotonic())
        answer: Answer | NotAnswered
        try:
            answer = await self._sender.send(
                one.batch.key_id, one.batch.endpoint, request.body, one.wake
            )
        except NotAnswered as error:
            answer = error
        with self._handling(one.batch.id, one.number):
            verdict = judge(answer)
            self._note(one, verdict, answer, slot)
            return one.outcome(verdict, answer)

    def _note(self, one: _Line, verdict: Verdict, answer: Answer | NotAnswered, slot: Slot) -> None:
        metrics.LINES.labels(verdict.value).inc()
        now = self._monotonic()
        if isinstance(answer, NotAnswered) and not answer.sent:
            self._say(now, str(answer))
        elif isinstance(answer, Answer) and answer.status == 401 and answer.refused:
            self._say(now, f"401 for key {one.batch.key_id}")
        if verdict is Verdict.REFUSED:
            slot.pace.refused(slot.began, now, getattr(answer, "retry_after_s", None))
        elif verdict is Verdict.ASLEEP:
            slot.pace.asleep(now, getattr(answer, "retry_after_s", None))
        elif verdict in {Verdict.OK, Verdict.ERROR}:
            metrics.LINE_SECONDS.observe(now - slot.began)
            slot.pace.answered(slot.began, now)
        elif verdict is Verdict.FAILED:
            slot.pace.failed(slot.began, now)

    def _say(self, now: float, reason: str) -> None:
        """Log the reason why lines cannot be sent, at intervals: it may last, and is the same for all lines."""
        if now - self._said_at >= _SAY_S:
            self._said_at = now
            log.warning("lines cannot be sent; they wait", reason=reason)


@dataclass(slots=True)
class _Line:
    """A line in an attempt, and the results that follow from the answer."""

    batch: BatchRecord
    number: int
    tried: Tried
    wake: str | None
    custom_id: str = ""

    def outcome(self, verdict: Verdict, answer: Answer | NotAnswered) -> Result | GivenBack:
        """Return the outcome of an answer for the line."""
        if verdict in {Verdict.REFUSED, Verdict.ASLEEP}:
            return GivenBack(attempt_counts=False)
        if verdict is Verdict.KEY_REFUSED:
            # Without a time, or with 0, the line would be sent again without a pause.
            unknown = isinstance(answer, Answer) and answer.status == 401
            rests_s = getattr(answer, "retry_after_s", None) or (UNKNOWN_REST_S if unknown else 1.0)
            return GivenBack(attempt_counts=False, key_rests_s=min(MAX_REST_S, rests_s))
        if isinstance(answer, AnswerTooLarge):
            return self._too_large(answer.most)
        if verdict is Verdict.FAILED or not isinstance(answer, Answer):
            return self.failed(answer)
        is_ok = verdict is Verdict.OK
        text = answered_line(self.batch, self.number, self.custom_id, answer, is_valid=is_ok)
        if len(text) > _MAX_RESULT:
            # Line separators in texts are escaped, which takes more bytes.
            return self._too_large(_MAX_RESULT)
        return Result(self.number, is_ok, text)

    def failed(self, why: Answer | NotAnswered | str) -> Result | GivenBack:
        """Return a further attempt, or an error line after the last attempt."""
        attempts = self.tried.failed + 1
        if attempts >= MAX_ATTEMPTS:
            return self._given_up(attempts, why)
        names = {"batch": self.batch.id, "line": self.number}
        log.info("attempt failed", **names, attempt=attempts, reason=_reason(why))
        return GivenBack(attempt_counts=True)

    def over(self) -> Result | None:
        """Return the error line of a line after its last attempt."""
        failed, killed = self.tried
        if killed >= MAX_KILLS:
            return self._given_up(killed, "the process that handled the answer ended")
        return (
            self._given_up(failed, "it is not known any more") if failed >= MAX_ATTEMPTS else None
        )

    def _given_up(self, attempts: int, why: Answer | NotAnswered | str) -> Result:
        text = failed_line(self.batch, self.number, self.custom_id, attempts, why)
        return Result(self.number, ok=False, text=text)

    def _too_large(self, most: int) -> Result:
        text = too_large_line(self.batch, self.number, self.custom_id, most)
        return Result(self.number, ok=False, text=text)


def _reason(why: Answer | NotAnswered | str) -> str:
    """Return the reason of a failed attempt, without the text of an answer, which belongs to the key."""
    if not isinstance(why, Answer):
        return str(why)
    return f"status {why.status}{', and no JSON' if why.status < 300 else ''}"
