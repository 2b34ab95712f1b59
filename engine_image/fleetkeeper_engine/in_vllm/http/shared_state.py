"""The middleware's side of shared memory: it reads the supervisor's block and writes its own."""

from __future__ import annotations

import os
from array import array

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.queue import Admission
from fleetkeeper_engine.in_vllm.http.grants.gate import GrantGate
from fleetkeeper_engine.in_vllm.http.latencies import LatencyRecord
from fleetkeeper_engine.shm.layout import MIDDLEWARE, Cells, GrantRefusal, Outcome, SupervisorBlock
from fleetkeeper_engine.shm.region import Region

_NO_ARRIVALS = (0.0, 0.0, 0.0)
_AT = MIDDLEWARE.cells


def _cells_of(name: str, count: int) -> slice:
    return slice(_AT[name], _AT[name] + count)


_WAITING, _WAITING_SEQUENCES, _OLDEST_ARRIVAL, _RELEASED, _RELEASED_SEQUENCES = (
    _AT[name]
    for name in (
        "waiting",
        "waiting_sequences",
        "oldest_arrival",
        "released",
        "released_sequences",
    )
)
_ARRIVALS, _SQUARED = (_cells_of(name, len(Tier)) for name in ("arrivals", "arrivals_squared"))
_GRANTS_REFUSED = _cells_of("grants_refused", len(GrantRefusal))
_OUTCOMES = _cells_of("outcomes", len(Tier) * len(Outcome))


class SharedState:
    """The middleware's view of shared memory: reads the supervisor's block, writes what admission counts."""

    def __init__(self, region: Region | None, admission: Admission, grants: GrantGate) -> None:
        self._region = region
        self._admission = admission
        self._grants = grants
        self._cells = Cells(MIDDLEWARE)
        self._cells.whole[MIDDLEWARE.cells["pid"]] = os.getpid()
        self.latencies = LatencyRecord(self._cells)
        self._supervisor_block: SupervisorBlock | None = None
        self._supervisor_sequence = -1
        self.unauthorized = 0
        self.rejected = 0

    def refresh(self) -> None:
        """Pass a changed supervisor's block to admission."""
        if self._region is None:
            return
        sequence = self._region.supervisor_sequence()
        if sequence != self._supervisor_sequence:
            self._supervisor_sequence = sequence
            self._supervisor_block = self._region.read_supervisor()
            self._admission.apply_supervisor_block(self._supervisor_block)

    def drain_is_over(self, now: float) -> bool:
        """Return whether the deadline of a drain has passed."""
        block = self._supervisor_block
        return block is not None and block.draining and 0.0 < block.drain_deadline <= now

    def engine_oldest(self) -> tuple[float, ...]:
        """Return the arrival of the oldest request inside vLLM that no step has held yet, by tier."""
        return (
            _NO_ARRIVALS if self._region is None else self._region.read_heartbeat().oldest_arrival
        )

    def publish(self) -> None:
        """Write the block."""
        if self._region is None:
            return
        whole, real, admission = self._cells.whole, self._cells.real, self._admission
        # Attributes instead of methods: for a lone request this runs twice.
        for tier, state in enumerate(admission.tiers):
            whole[_WAITING + tier] = len(state.queue)
            whole[_WAITING_SEQUENCES + tier] = state.waiting_sequences
            real[_OLDEST_ARRIVAL + tier] = state.oldest_arrival
            whole[_RELEASED + tier] = state.released
            whole[_RELEASED_SEQUENCES + tier] = state.held
        whole[_ARRIVALS] = array("Q", admission.arrivals.total)
        whole[_SQUARED] = array("Q", admission.arrivals.squared)
        whole[_OUTCOMES] = array("Q", admission.outcomes)
        whole[_AT["generation"]] = (
            0 if self._supervisor_block is None else self._supervisor_block.generation
        )
        whole[_AT["unauthorized"]] = self.unauthorized
        whole[_AT["rejected"]] = self.rejected
        whole[_AT["grants_demanded"]] = int(self._grants.demanded)
        whole[_GRANTS_REFUSED] = array("Q", self._grants.refused)
        whole[_AT["own_rule_closed"]] = int(admission.own_rule_closed)
        self._region.publish(self._cells)
