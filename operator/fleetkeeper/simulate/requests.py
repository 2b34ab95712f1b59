"""A simulated request, and what became of it."""

from __future__ import annotations

from typing import Final

NOT_YET: Final = -1.0


class Request:
    """A request: its arrival (s), tier (0 realtime, 1 standard, 2 batch), prompt and generated tokens.

    `to_prefill`, `to_generate`: tokens left to compute; a preempted request computes its prompt and what
    it generated again. `scheduled`, `first_token`, `ended`: times, negative while unknown. `router`: the
    number of the router pod that sent it.
    """

    __slots__ = (
        "arrived", "ended", "first_token", "generated", "prompt", "router", "scheduled", "tier",
        "to_generate", "to_prefill",
    )  # fmt: skip

    def __init__(self, arrived: float, tier: int, prompt: int, generated: int) -> None:
        self.arrived = arrived
        self.tier = tier
        self.prompt = self.to_prefill = max(1, int(prompt))
        self.generated = self.to_generate = max(1, int(generated))
        self.scheduled = self.first_token = self.ended = NOT_YET
        self.router = 0

    @property
    def ttft_s(self) -> float:
        """The time to the first token, seconds."""
        return self.first_token - self.arrived

    @property
    def tpot_s(self) -> float:
        """The mean time per output token after the first, seconds; 0 for a single token."""
        if self.generated <= 1:
            return 0.0
        return (self.ended - self.first_token) / (self.generated - 1)
