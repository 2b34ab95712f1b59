"""One attempt at a line: read it, send it, and say what that means."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from fleetkeeper_gateway.batch import metrics
from fleetkeeper_gateway.batch.interfaces import (
    Answer,
    NotAnswered,
    ObjectMissing,
    Sender,
    StorageError,
    Taken,
)
from fleetkeeper_gateway.batch.model import MAX_ATTEMPTS, Result
from fleetkeeper_gateway.batch.workers.inputs import Inputs
from fleetkeeper_gateway.batch.workers.lines import (
    Request,
    Verdict,
    answered_line,
    failed_line,
    judge,
)
from fleetkeeper_gateway.batch.workers.pace import Slot

log = structlog.get_logger(__name__)

_TELL_S: Final = 60.0
LONGEST_REST_S: Final = 300.0
"""Of a key, whatever Retry-After says: the limit may have been raised."""
UNKNOWN_REST_S: Final = 30.0
"""Of a key that the upstream does not accept."""
_UNREAD_S: Final = 5.0
"""Rest of a key whose lines cannot be read from the store."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """A line without a result, to be tried again."""

    attempt_counts: bool
    key_rests_s: float | None = None
    """Seconds for which no lines of its key are tried."""


class Attempts:
    """Makes attempts."""

    def __init__(
        self, inputs: Inputs, sender: Sender, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._inputs = inputs
        self._sender = sender
        self._monotonic = monotonic
        self._told = -math.inf
        """When the log last said that lines cannot be sent."""

    async def make(self, taken: Taken, slot: Slot) -> Result | GivenBack:
        """Return the result of a line, or why there is none.

        Raises:
            ValueError: if the line is no request, which validation should have found.
        """
        if taken.attempt > MAX_ATTEMPTS:
            # Its lease ran out each time: it ended this process, or its result cannot be kept.
            return broken(taken)
        try:
            request = await self._inputs.request(taken.batch, taken.line)
        except ObjectMissing as error:
            metrics.LINES.labels("unread").inc()
            log.error("the input file of a line is gone", batch=taken.batch.id, error=str(error))  # noqa: TRY400
            return broken(taken)
        except StorageError as error:
            metrics.STORE_FAILURES.labels("input").inc()
            metrics.LINES.labels("unread").inc()
            log.warning("line cannot be read", batch=taken.batch.id, error=str(error))
            return GivenBack(attempt_counts=False, key_rests_s=_UNREAD_S)
        slot.sent(self._monotonic())
        answer: Answer | NotAnswered
        try:
            answer = await self._sender.send(taken.batch.key_id, taken.batch.endpoint, request.body)
            verdict = judge(answer)
            if answer.status == 401 and verdict is Verdict.KEY_REFUSED:
                self._tell(NotAnswered(f"401 for key {taken.batch.key_id}", sent=False))
        except NotAnswered as error:
            answer = error
            verdict = Verdict.FAILED if error.sent else Verdict.REFUSED
            self._tell(error)
        self._note(verdict, answer, slot)
        return _outcome(taken, request, verdict, answer)

    def _tell(self, error: NotAnswered) -> None:
        """Say why lines cannot be sent, once in a while: it may last, and is the same for all."""
        now = self._monotonic()
        if not error.sent and now - self._told >= _TELL_S:
            self._told = now
            log.warning("lines cannot be sent; they wait", reason=str(error))

    def _note(self, verdict: Verdict, answer: Answer | NotAnswered, slot: Slot) -> None:
        metrics.LINES.labels(verdict.value).inc()
        now = self._monotonic()
        if verdict is Verdict.REFUSED:
            slot.refused(now, getattr(answer, "retry_after_s", None))
        elif verdict in {Verdict.OK, Verdict.ERROR}:
            metrics.LINE_SECONDS.observe(now - slot.began)
            slot.answered(now)
        elif verdict is Verdict.FAILED:
            slot.failed(now)


def _outcome(
    taken: Taken, request: Request, verdict: Verdict, answer: Answer | NotAnswered
) -> Result | GivenBack:
    if verdict is Verdict.REFUSED:
        return GivenBack(attempt_counts=False)
    if verdict is Verdict.KEY_REFUSED:
        # Without a time, or with 0, it would be sent again and again without a pause.
        unknown = isinstance(answer, Answer) and answer.status == 401
        rests_s = getattr(answer, "retry_after_s", None) or (UNKNOWN_REST_S if unknown else 1.0)
        return GivenBack(attempt_counts=False, key_rests_s=min(LONGEST_REST_S, rests_s))
    number, custom_id = taken.line.number, request.custom_id
    if verdict is Verdict.FAILED or not isinstance(answer, Answer):
        if taken.attempt < MAX_ATTEMPTS:
            log.info("attempt failed", batch=taken.batch.id, line=number, attempt=taken.attempt)
            return GivenBack(attempt_counts=True)
        text = failed_line(taken.batch, number, custom_id, taken.attempt, answer)
    else:
        text = answered_line(taken.batch, number, custom_id, answer)
    return Result(number, taken.attempt, taken.fence, verdict is Verdict.OK, text)


def broken(taken: Taken) -> Result | GivenBack:
    """Return what follows a defect: another attempt, or an error line after the last one."""
    if taken.attempt < MAX_ATTEMPTS:
        return GivenBack(attempt_counts=True)
    why = NotAnswered("the line could not be processed", sent=False)
    number = taken.line.number
    text = failed_line(taken.batch, number, "", taken.attempt, why)
    return Result(number, taken.attempt, taken.fence, ok=False, text=text)
