"""The middleware's side of the shared page: orders in, its own block out."""

from __future__ import annotations

import os

from fleetkeeper_engine.admission import Admission
from fleetkeeper_engine.page import Page
from fleetkeeper_engine.page_layout import MIDDLEWARE, Cells, SupervisorBlock, Tier

_NO_ARRIVALS = (0.0, 0.0, 0.0)


class MiddlewarePage:
    """Reads orders when they changed and writes what admission counts."""

    def __init__(self, page: Page | None, admission: Admission) -> None:
        self._page = page
        self._admission = admission
        self._cells = Cells(MIDDLEWARE)
        self._cells.whole[MIDDLEWARE.cells["pid"]] = os.getpid()
        self._orders: SupervisorBlock | None = None
        self._orders_sequence = -1
        self.unauthorized = 0
        self.rejected = 0

    def read_orders(self) -> None:
        """Hands new orders to admission."""
        if self._page is None:
            return
        sequence = self._page.orders_sequence()
        if sequence != self._orders_sequence:
            self._orders_sequence = sequence
            self._orders = self._page.read_supervisor()
            self._admission.take_orders(self._orders)

    def drain_is_over(self, now: float) -> bool:
        """Whether the deadline of a drain has passed."""
        orders = self._orders
        return orders is not None and orders.draining and 0.0 < orders.drain_deadline <= now

    def engine_oldest(self) -> tuple[float, ...]:
        """Arrival of the oldest request inside vLLM that no step has held yet, by tier."""
        found = self._page.read_oldest_arrivals() if self._page is not None else None
        return _NO_ARRIVALS if found is None else found

    def publish(self, now: float) -> None:
        """Writes the block."""
        if self._page is None:
            return
        whole, real, at, admission = (
            self._cells.whole,
            self._cells.real,
            MIDDLEWARE.cells,
            self._admission,
        )
        for tier in Tier:
            whole[at["waiting"] + tier] = admission.waiting(tier)
            whole[at["waiting_sequences"] + tier] = admission.waiting_sequences(tier)
            real[at["oldest_arrival"] + tier] = admission.oldest_arrival(tier)
            whole[at["released"] + tier] = admission.released(tier)
            whole[at["released_sequences"] + tier] = admission.held(tier)
            whole[at["arrivals"] + tier] = admission.arrivals.total[tier]
            whole[at["arrivals_squared"] + tier] = admission.arrivals.squared[tier]
        place = at["outcomes"]
        for number, count in enumerate(admission.outcomes):
            whole[place + number] = count
        whole[at["generation"]] = 0 if self._orders is None else self._orders.generation
        whole[at["unauthorized"]] = self.unauthorized
        whole[at["rejected"]] = self.rejected
        whole[at["own_rule_closed"]] = int(admission.own_rule_closed)
        real[at["written"]] = now
        self._page.publish(self._cells)
