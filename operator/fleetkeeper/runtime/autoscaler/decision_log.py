"""The operator's log of decisions: one line for each decision that changed something."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from fleetkeeper.autoscale.decided import Decided
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.runtime.queue import Key

log = structlog.get_logger(__name__)


def log_decisions(key: Key, decision: ControlDecision, made: Iterable[Decided]) -> None:
    """Write one line for each decision of a tick that changed something, and what it was made with.

    Unknown measurements are null. Every value is a figure, a name, or a text of the operator.
    """
    signals, settings = decision.signals, decision.settings
    for item in made:
        log.info(
            "decision",
            namespace=key.namespace,
            service=key.name,
            subject=str(item.subject),
            **{"from": item.before, "to": item.after},
            reason=item.reason,
            why=item.why,
            words=item.words,
            queue_wait_s=round(signals.queue_wait_s, 6) if signals.known else None,
            queue_wait_objective_s=settings.queue_wait_objective_s,
            batch_time_s=round(signals.batch_time_s, 6) if signals.known else None,
            batch_time_objective_s=settings.batch_time_objective_s,
        )
