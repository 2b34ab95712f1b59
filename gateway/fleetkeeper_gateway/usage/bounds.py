"""Bounds on a tenant's part of one hour's file. Pure.

An engine chooses the model names in its entries, and may claim any number of them. So names are bounded
by service, and lines by namespace: a tenant chooses the labels of its pods, but not their namespace.
Nothing is left out of the sums; beyond a bound, lines have fewer dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from fleetkeeper_gateway.usage.lines import OTHER, Pod, Room

MAX_MODELS: Final = 64
"""Maximum model names of a service. An InferenceService may have 33: the served name and 32 adapters."""
MAX_ATTEMPTS: Final = 1_000_000
"""Maximum lines of single attempts of a namespace, of up to about 300 bytes each."""
MAX_OTHERS: Final = 200_000
"""Maximum other lines of a namespace: about 140 replicas, each with unattributed requests in every reading."""


class HourBounds:
    """Counts of the lines in the file of one hour."""

    def __init__(self) -> None:
        self._hour = ""
        self._models: dict[tuple[str, str], set[str]] = {}
        self._attempts: Counter[str] = Counter()
        self._others: Counter[str] = Counter()

    def begin(self, hour: str) -> None:
        """Reset the counts at the start of another hour."""
        if hour != self._hour:
            self._hour = hour
            self._models, self._attempts, self._others = {}, Counter(), Counter()

    def room(self, pod: Pod) -> Room:
        """Return the dimensions that lines of a pod's page may have."""
        models = self._models.setdefault((pod.namespace, pod.service), set())

        def model(name: str) -> str:
            if name not in models and len(models) >= MAX_MODELS:
                return OTHER
            models.add(name)
            return name

        return Room(
            model,
            keeps_attempts=self._attempts[pod.namespace] < MAX_ATTEMPTS,
            keeps_dimensions=not self.is_used_up(pod.namespace),
        )

    def is_used_up(self, namespace: str) -> bool:
        """Return whether a namespace has reached its maximum of lines without an attempt."""
        return self._others[namespace] >= MAX_OTHERS

    def note(self, namespace: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count the lines of a group, and one for its commit unless it commits attempts."""
        attempts = others = 0
        for line in lines:
            attempts += "attempt" in line
            others += "attempt" not in line
            if line.get("model"):
                service = (namespace, str(line["service"]))
                self._models.setdefault(service, set()).add(str(line["model"]))
        self._attempts[namespace] += attempts
        self._others[namespace] += others + (not attempts)
