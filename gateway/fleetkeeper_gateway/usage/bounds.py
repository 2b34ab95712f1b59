"""How much of one hour's file a tenant may take. Pure.

An engine names the models in its entries, and may claim any number of them. So names are bounded for
each service, and lines for each namespace: labels of a pod are its author's, the namespace is not.
Nothing is left out of the sums; beyond a bound, lines have fewer dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from fleetkeeper_gateway.usage.lines import OTHER, Pod, Room

MAX_MODELS: Final = 64
"""Names of a service. The schema of an InferenceService allows 33: the served name and 32 adapters."""
MAX_ATTEMPTS: Final = 1_000_000
"""Lines of single attempts of a namespace, at most about 300 bytes each."""
MAX_OTHERS: Final = 200_000
"""Other lines of a namespace: about 140 replicas, each with unattributed requests in every reading."""


class HourBounds:
    """What the file of one hour has already taken."""

    def __init__(self) -> None:
        self._hour = ""
        self._models: dict[tuple[str, str], set[str]] = {}
        self._attempts: Counter[str] = Counter()
        self._others: Counter[str] = Counter()

    def begin(self, hour: str) -> None:
        """Begin with nothing, if this is another hour."""
        if hour != self._hour:
            self._hour = hour
            self._models, self._attempts, self._others = {}, Counter(), Counter()

    def room(self, pod: Pod) -> Room:
        """Return what of a pod's page may have lines of its own."""
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
        """Return whether a namespace has as many lines without an attempt as it may have."""
        return self._others[namespace] >= MAX_OTHERS

    def note(self, namespace: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Count the lines of a group. Its commit is one more, unless it commits attempts."""
        attempts = others = 0
        for line in lines:
            attempts += "attempt" in line
            others += "attempt" not in line
            if line.get("model"):
                service = (namespace, str(line["service"]))
                self._models.setdefault(service, set()).add(str(line["model"]))
        self._attempts[namespace] += attempts
        self._others[namespace] += others + (not attempts)
