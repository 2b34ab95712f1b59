"""Replica allocations of all services, within the configured GPU budgets."""

from __future__ import annotations

from collections.abc import Sequence

from fleetkeeper.autoscale.arbitrate import Allocation, Want, arbitrate
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger


class Arbiter:
    """The allocator for all services at once. It skips a recommendation that makes allocation fail."""

    def __init__(self, ledger: GpuLedger, defects: Defects) -> None:
        self._ledger = ledger
        self._defects = defects

    def allocations(self, wants: Sequence[tuple[Key, Want]]) -> dict[Key, Allocation]:
        """Return the allocations by service. A service without one keeps what it has."""
        budget, holdings = self._ledger.budget, self._ledger.holdings()
        granted: dict[tuple[str, str], Allocation] = {}
        with self._defects.contained("arbitrate") as step:
            granted = arbitrate((want for _, want in wants), budget, holdings)
        if step.failed:
            granted = arbitrate(self._sound(wants), budget, holdings)
        return {key: granted[want.key] for key, want in wants if want.key in granted}

    def _sound(self, wants: Sequence[tuple[Key, Want]]) -> list[Want]:
        """Return the recommendations that can be allocated on their own."""
        sound = []
        for key, want in wants:
            with self._defects.contained("arbitrate", key):
                arbitrate((want,), self._ledger.budget)
                sound.append(want)
        return sound
