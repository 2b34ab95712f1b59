"""Values of the batch rules: their inputs, their memory, and the step of a rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fleetkeeper.autoscale.capacity.targets import Targets, notches_between
from fleetkeeper.autoscale.constants import NEAR_NOTCHES, UP_FACTOR
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.types import ControlSettings, Decision, Limits


@dataclass(frozen=True, slots=True)
class BatchView:
    """Inputs of the rules.

    While replicas are pending, limits are not lowered below the running sequences. They may rise as
    usual: a cold start takes minutes, and a larger batch helps now.
    """

    signals: Signals
    settings: ControlSettings
    targets: Targets | None = None
    pending: int = 0
    """Replicas that are starting."""
    may_raise: bool = True
    """True while the control breaker is closed and no canary runs."""
    gated: bool = False
    """True while the load breaker is not closed."""
    model_missed: bool = False
    """True while limits must not follow the model, because it was wrong in the last window."""


@dataclass(frozen=True, slots=True)
class BeforeRaise:
    """The state before the last raise: the limits, and batch time attainment under them."""

    limits: Limits
    attained: float


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """The memory of the rules."""

    limits: Limits | None = None
    """The current limits of all pods (None: never set)."""
    changed: float = 0.0
    """Time of the last change."""
    raised: float = 0.0
    """Time of the last raise."""
    before_raise: BeforeRaise | None = None
    """The state with which a raise is compared."""
    rest_until: float = 0.0
    """Time before which there is no raise, after a canary failed."""
    reversals: tuple[float, ...] = ()
    """Times of changes of direction over 15 minutes, counted for each limit. Moves of at most two notches
    do not count."""
    last_directions: tuple[int, int] = (0, 0)
    """Direction of the last such move of sequences and of tokens."""


Step = tuple[Decision[Limits], BatchMemory]
"""The limits that a rule decides, and the memory after it."""

Rule = Callable[[BatchView, BatchMemory, Limits, float], Step | None]


def start_up(settings: ControlSettings) -> Limits:
    """Return the limits with which the engine starts; live limits never exceed them."""
    return Limits(settings.max_sequences, settings.max_tokens)


def clamped(limits: Limits, settings: ControlSettings) -> Limits:
    """Return the limits clamped to [floor, start-up value]; applied after every change."""
    return Limits(
        min(settings.max_sequences, max(settings.min_sequences, limits.sequences)),
        min(settings.max_tokens, max(settings.min_tokens, limits.tokens)),
    )


def far_moves(before: Limits, after: Limits, settings: ControlSettings) -> tuple[bool, bool]:
    """Return whether sequences and tokens moved by more than two notches.

    Example: 64 to 78 sequences are two notches of a tenth, 64 to 80 are more.
    """
    few, many = sorted((before.sequences, after.sequences))
    return (
        many > math.ceil(few * UP_FACTOR**NEAR_NOTCHES),
        abs(notches_between(before.tokens, after.tokens, settings)) > NEAR_NOTCHES,
    )
