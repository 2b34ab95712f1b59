"""Start-up values that a remedy lowered below what the spec asks."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api.types import InferenceServiceSpec


@dataclass(frozen=True, slots=True)
class EngineTuning:
    """What a remedy in force changes in the engine's start-up; None leaves the spec's value.

    A value above the spec's is cut to it: a remedy only lowers.
    """

    max_sequences: int | None = None
    """The most sequences in a batch."""
    cap_percent: int | None = None
    """The memory cap, in percent."""

    def sequences(self, spec: InferenceServiceSpec) -> int:
        """The start-up value of the sequences, never below one."""
        asked = spec.batching.max_sequences
        return asked if self.max_sequences is None else max(1, min(asked, self.max_sequences))

    def cap(self, spec: InferenceServiceSpec) -> int:
        """The memory cap in percent, never below the schema's ten."""
        asked = spec.memory.cap_percent
        return asked if self.cap_percent is None else max(10, min(asked, self.cap_percent))


AS_SPECIFIED = EngineTuning()
"""No remedy is in force."""
