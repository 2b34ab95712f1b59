"""A simulated engine's core in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fleetkeeper_engine.simulated.config import CacheConfig, SchedulerConfig, SimulatedConfig
from fleetkeeper_engine.simulated.core import SequenceOutput, SimulatedCore, Work
from fleetkeeper_steps.costs import StepCosts

COSTS = StepCosts(0.003, 0.004, 2e-5, 5e-6, 4e-7, 1e-9, 1e-4)


def config(
    *, blocks: int = 1000, costs: StepCosts = COSTS, speed: float = 1.0, **scheduler: Any
) -> SimulatedConfig:
    """Return an engine of 64 sequences and 2,048 tokens, unless `scheduler` says otherwise."""
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, **scheduler}
    return SimulatedConfig(SchedulerConfig(**limits), CacheConfig(blocks), costs, speed)


@dataclass
class VirtualCore:
    """A core whose clock moves only while it sleeps, by what it asks for and `late_s` more (of 0: nothing).

    `before_step`: called at the start of each sleep, which is in a step, with this object.
    """

    settings: SimulatedConfig
    now: float = 100.0
    late_s: Callable[[], float] = lambda: 0.0
    before_step: Callable[[VirtualCore], None] = lambda _: None
    outputs: list[tuple[float, SequenceOutput]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._left = 0
        self._done = asyncio.Event()
        self.core = SimulatedCore(
            self.settings, self._on_step, clock=lambda: self.now, sleep=self._sleep
        )

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def add(self, *works: Work) -> None:
        """Add requests, at their arrivals or now."""
        for work in works:
            at, self.now = self.now, work.arrival_s or self.now
            self._left += 1
            self.core.add(work)
            self.now = at

    async def finish(self, works: Iterable[Work] = ()) -> None:
        """Run until every request has ended."""
        self.add(*works)
        self._done.clear()
        loop = asyncio.create_task(self.core.run())
        done = asyncio.create_task(self._done.wait())
        await asyncio.wait([loop, done], return_when=asyncio.FIRST_COMPLETED)
        if loop.done():
            await loop
        loop.cancel()
        await asyncio.wait([loop])

    def of(self, request_id: str) -> list[tuple[float, SequenceOutput]]:
        """Return the outputs of a request and their times."""
        return [row for row in self.outputs if row[1].request_id == request_id]

    def first_and_last(self, request_id: str) -> tuple[float, float]:
        """Return the times of a request's first and last output."""
        rows = self.of(request_id)
        return rows[0][0], rows[-1][0]

    async def _sleep(self, seconds: float) -> None:
        self.steps += 1
        self.before_step(self)
        if seconds:
            self.now += seconds + self.late_s()
        await asyncio.sleep(0)

    def _on_step(self, outputs: list[SequenceOutput]) -> None:
        self.outputs += [(self.now, output) for output in outputs]
        self._left -= sum(output.finished_reason is not None for output in outputs)
        if not self._left:
            self._done.set()
