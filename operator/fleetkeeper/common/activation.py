"""The activation of a service: whether it runs replicas, and the field that sets their number.

Every part of the operator reads it here.

The first of these that applies sets the number: `spec.suspend` (0), `spec.replicas`, sleep (0), the number
before `spec.suspend`. Otherwise the service is scaled: the control loop or another autoscaler sets it.

Only the live Deployment has the number of a scaled service, and spec.suspend scales that to 0. So the
number is written to `status.suspendedReplicas` one reconcile before, and stays there until the service
runs again: a crash between any two writes loses nothing.

    running ──spec.suspend──► number in the status ──► no replicas ──not spec.suspend──► number applied
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fleetkeeper.api.types import InferenceServiceSpec, ScalingMode


class State(StrEnum):
    """The setting that determines the number of replicas. The value is the text for messages."""

    SCALED = "scaling"
    PINNED = "spec.replicas"
    RESUMING = "the number before spec.suspend"
    SUSPENDED = "spec.suspend"
    ASLEEP = "scaling.sleep"


@dataclass(frozen=True, slots=True)
class Activation:
    """The setting that determines the number of replicas, and the number; None while the service is scaled."""

    state: State = State.SCALED
    replicas: int | None = None

    @property
    def is_scaled(self) -> bool:
        """Return True if an autoscaler sets the number, within minReplicas and maxReplicas."""
        return self.replicas is None

    @property
    def is_off(self) -> bool:
        """Return True if the service runs no replica on purpose."""
        return self.replicas == 0

    @property
    def is_suspended(self) -> bool:
        """Return True if spec.suspend is the purpose."""
        return self.state is State.SUSPENDED

    @property
    def is_asleep(self) -> bool:
        """Return True if the service has no replica because no request comes."""
        return self.state is State.ASLEEP

    def floor(self, least: int) -> int:
        """Return how many replicas the service is to run at least, `least` if it is scaled."""
        return least if self.replicas is None else self.replicas


SCALED = Activation()


def activation_of(
    spec: InferenceServiceSpec, remembered: int | None = None, *, is_asleep: bool = False
) -> Activation:
    """Return the activation. `remembered`: the number before spec.suspend, if it is still to apply.

    A paused service keeps what runs, so spec.suspend takes effect after the pause.
    """
    if spec.suspend and not spec.paused:
        return Activation(State.SUSPENDED, 0)
    if spec.replicas is not None:
        return Activation(State.PINNED, spec.replicas)
    if is_asleep:
        return Activation(State.ASLEEP, 0)
    if remembered is not None:
        return Activation(State.RESUMING, _resumed(spec, remembered))
    return SCALED


def parse_suspended(status: Mapping[str, Any]) -> int | None:
    """Parse `status.suspendedReplicas`, None if it is absent or no number of replicas."""
    value = status.get("suspendedReplicas")
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if value > 0 else None


def decide_suspended(
    spec: InferenceServiceSpec, status: Mapping[str, Any], live: int | None
) -> int | None:
    """Return the number of replicas to keep in the status, None if none needs to be kept.

    While the service is paused, nothing changes.
    """
    known = parse_suspended(status)
    if spec.paused:
        return known
    if spec.suspend:
        return known or live or None
    return None if live or spec.replicas is not None else known


def _resumed(spec: InferenceServiceSpec, number: int) -> int:
    """Return the number with which a service starts again: within the bounds where these apply."""
    if spec.scaling.mode is not ScalingMode.AUTO:
        return number
    return min(max(number, spec.scaling.min_replicas), spec.scaling.max_replicas)
