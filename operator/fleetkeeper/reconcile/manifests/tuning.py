"""Start-up values that a remedy lowered below the spec's values."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.api.types import InferenceServiceSpec


@dataclass(frozen=True, slots=True)
class EngineTuning:
    """The start-up values that a remedy lowers. None leaves the spec's value.

    A value above the spec's is ignored, because a remedy only lowers values.
    """

    max_sequences: int | None = None
    """The maximum number of sequences in a batch."""
    cap_percent: int | None = None
    """The memory cap, in percent."""

    def sequences(self, spec: InferenceServiceSpec) -> int:
        """Return the start-up value of the sequences, at least 1."""
        asked = spec.batching.max_sequences
        return asked if self.max_sequences is None else max(1, min(asked, self.max_sequences))

    def cap(self, spec: InferenceServiceSpec) -> int:
        """Return the memory cap in percent, at least 10 (the schema's minimum)."""
        asked = spec.memory.cap_percent
        return asked if self.cap_percent is None else max(10, min(asked, self.cap_percent))


AS_SPECIFIED = EngineTuning()
"""No remedy is in force."""
