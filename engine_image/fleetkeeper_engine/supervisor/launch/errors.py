"""The error that refuses a start before vLLM runs."""

from __future__ import annotations

from fleetkeeper_contract.exit_codes import DeathClass


class StartRefusedError(Exception):
    """The engine cannot be started as specified; `str(error)` is one sentence for the user."""

    def __init__(self, death: DeathClass, message: str, phase: str = "plan") -> None:
        super().__init__(message)
        self.death = death
        self.phase = phase
