"""A backlog of batches, and the client that works on it: as much at a time as the engines take.

Lines go to tier batch, the batch with the earliest deadline first. A refusal makes the client wait and
send less, each second without one lets it send more. What the operator reads are the gauges of the batch
process. Lines are computed after their deadline too, so that a report can state how late they are; the
real process ends them with `batch_expired`, so they are in no gauge.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from fleetkeeper.autoscale.signals.backlog import Backlog
from fleetkeeper.simulate.arguments import Batch
from fleetkeeper.simulate.cluster import Cluster
from fleetkeeper.simulate.loads.arrivals import Mix
from fleetkeeper.simulate.requests import Request

SCRAPE_S: Final = 15.0
"""Interval at which Prometheus scrapes the gateway, as the chart sets it."""
FIRST: Final = 8.0
"""Lines that the client sends at first."""
GROWTH: Final = 1.05
"""Factor on the lines that may run, for a second without a refusal."""
CUT: Final = 0.7
"""Factor for a refusal."""
RETRY_S: Final = 5.0
"""Retry-After of a refused line."""
MAX_EACH: Final = 256.0
"""Lines that may run for each ready replica."""
MOST: Final = 896.0
"""Lines that may run at all: one key may have 7/8 of the places of a batch process, which has 1,024 by default."""


class BatchLine(Request):
    """A line of a batch."""

    __slots__ = ("work",)

    def __init__(self, now: float, tier: int, line: tuple[int, int], work: BatchWork) -> None:
        super().__init__(now, tier, *line)
        self.work = work


@dataclass(slots=True)
class BatchWork:
    """The progress of a batch."""

    batch: Batch
    waiting: deque[tuple[int, int]]
    """Lines that do not run."""
    left: int
    """Tokens without a result."""
    finished: float | None = None
    """Time at which the last line ended; None while lines are left."""


@dataclass
class BatchClient:
    """The client. All times are those of the cluster; `start` is that of the run."""

    start: float
    tier: int
    works: tuple[BatchWork, ...]
    in_flight: int = 0
    _may_run: float = FIRST
    _resumes: float = -math.inf
    _scraped: float = -math.inf
    _open: list[BatchWork] = field(default_factory=list)

    def step(self, cluster: Cluster, now: float) -> None:
        """Take the lines that ended, send others, and export. Call once a second."""
        for pod in (*cluster.pods.values(), *cluster.draining):
            cluster.advance(pod, now)
        self._open = [
            work
            for work in sorted(self.works, key=lambda work: work.batch.deadline_s)
            if work.finished is None and now - self.start >= work.batch.start_s
        ]
        if now >= self._resumes:
            self._send(cluster, now)
        if now - self._scraped >= SCRAPE_S:
            self._scraped = now
            cluster.backlog = self._backlog(now)

    def _send(self, cluster: Cluster, now: float) -> None:
        ready = sum([pod.engine is not None for pod in cluster.pods.values()])
        self._may_run = min(self._may_run * GROWTH, MAX_EACH * max(1, ready), MOST)
        for work in self._open:
            while work.waiting and self.in_flight < int(self._may_run):
                line = BatchLine(now, self.tier, work.waiting[0], work)
                if not cluster.route(line):
                    self._may_run = max(1.0, CUT * self._may_run)
                    self._resumes = now + RETRY_S
                    return
                work.waiting.popleft()
                self.in_flight += 1

    def others(self, requests: Iterable[Request], *, lost: bool = False) -> list[Request]:
        """Take the lines out of requests that ended or were lost, and return the other requests."""
        rest = []
        for request in requests:
            if not isinstance(request, BatchLine):
                rest.append(request)
                continue
            work = request.work
            self.in_flight -= 1
            if lost:
                work.waiting.appendleft((request.prompt, request.generated))
                continue
            work.left -= request.prompt + request.generated
            if work.left == 0:
                work.finished = request.ended
        return rest

    def _backlog(self, now: float) -> Backlog | None:
        """Return what the process exports; None without lines that can be in time."""
        due = [work for work in self._open if self.start + work.batch.deadline_s > now]
        if not due:
            return None
        tokens, rate = 0, 0.0
        for work in due:
            tokens += work.left
            rate = max(rate, tokens / (self.start + work.batch.deadline_s - now))
        return Backlog(float(tokens), self.start + due[0].batch.deadline_s, rate, now)


def batch_client(
    batches: Sequence[Batch], mix: Mix, start: float, seed: int, *, tier: int, longest: int
) -> BatchClient:
    """Return the client of these batches. Their lines are drawn from the seed alone.

    `longest`: the tokens that an engine can hold; prompt and answer are cut at a half of it.
    """
    random = Random(f"batches {seed}")  # noqa: S311 - seeded on purpose
    works = []
    for batch in batches:
        lines: deque[tuple[int, int]] = deque()
        tokens = 0
        while tokens < batch.tokens:
            request = mix.draw(0.0, random)
            line = (min(request.prompt, longest // 2), min(request.generated, longest // 2))
            lines.append(line)
            tokens += sum(line)
        works.append(BatchWork(batch, lines, tokens))
    return BatchClient(start, tier, tuple(works))
