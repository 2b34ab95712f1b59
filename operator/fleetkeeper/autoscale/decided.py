"""The decisions of one tick that changed something, for the log.

An entry that `status.decisions` also lists has the same words there, and so in `fleetkeeper explain`.
Remedies, hung engines and the source breaker have entries here only. The share of a tier that is admitted has none:
it moves in many ticks, and the entries of the load breaker say when shedding begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fleetkeeper.api.status_enums import Subject
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.events import breaker_moves
from fleetkeeper.autoscale.memory import ControlMemory, Shown
from fleetkeeper.common.values import Remedy, change_in_words

REMEDY: Final = "remedy"
SUBJECTS: Final = (*map(str, Subject), REMEDY)
"""The subjects of all entries."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision that changed something."""

    subject: str
    before: str
    after: str
    reason: str
    why: str
    """The message of the status or of the event."""
    words: str
    """One line for `status.decisions`, as `fleetkeeper explain` prints it."""


def decisions_made(
    decision: ControlDecision, before: ControlMemory, after: ControlMemory
) -> tuple[Decided, ...]:
    """Return the decisions that changed something between two ticks; empty for a service at rest."""
    return (
        *_shown(Subject.REPLICAS, before.shown_scaling, after.shown_scaling),
        *_shown(Subject.LIMITS, before.shown_batching, after.shown_batching),
        *_breakers(decision, before),
        *_restarts(decision),
        *_remedy(decision, before),
    )


def _of(subject: str, before: str, after: str, reason: str, why: str) -> Decided:
    return Decided(
        subject, before, after, reason, why, change_in_words(subject, before, after, reason)
    )


def _shown(subject: Subject, before: Shown, after: Shown) -> Iterator[Decided]:
    if before.value and before.value != after.value:
        yield _of(subject, before.value, after.value, after.reason, after.message)


def _breakers(decision: ControlDecision, before: ControlMemory) -> Iterator[Decided]:
    for move in breaker_moves(before.breakers, decision.state):
        event = move.event
        # The status lists a breaker's event instead of its states.
        words = change_in_words(Subject.BREAKER, "", listed_message(event.message), event.reason)
        yield Decided(
            Subject.BREAKER,
            f"{move.breaker} {move.before}",
            f"{move.breaker} {move.after}",
            event.reason,
            event.message,
            words,
        )


def listed_message(message: str) -> str:
    """Return the message of an event as `status.decisions` lists it."""
    return message[:120]


def _restarts(decision: ControlDecision) -> Iterator[Decided]:
    for pod, removal in decision.replace_pods.items():
        yield _of(Subject.RESTART, "", pod, removal.event.reason, removal.why)


def _remedy(decision: ControlDecision, before: ControlMemory) -> Iterator[Decided]:
    remedy = decision.remedy
    if remedy.valid:
        old, new = _remedy_text(before.remedy), _remedy_text(remedy.value)
        yield _of(REMEDY, old, new, remedy.reason, remedy.detail)


def _remedy_text(remedy: Remedy | None) -> str:
    return f"{remedy.max_sequences} sequences, cap {remedy.cap_percent}%" if remedy else ""
