"""Loads: traces from files, and patterns with Poisson arrivals. Times count from 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from fleetkeeper.simulate.requests import Request


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests of a pattern: mean tokens, and shares of realtime, standard, batch.

    Tokens are exponential, cut at eight times the mean.
    """

    prompt: float = 1000.0
    generated: float = 200.0
    tiers: tuple[float, float, float] = (0.0, 1.0, 0.0)

    def draw(self, now: float, random: Random) -> Request:
        """Return a request that arrives at `now`."""
        tier = random.choices((0, 1, 2), self.tiers)[0]
        prompt = min(8 * self.prompt, random.expovariate(1 / self.prompt))
        generated = min(8 * self.generated, random.expovariate(1 / self.generated))
        return Request(now, tier, round(prompt), round(generated))


def poisson(
    rate: Callable[[float], float], most: float, mix: Mix
) -> Callable[[Random], Iterator[Request]]:
    """Return a load with `rate(t)` arrivals/s, at most `most`, by thinning (Lewis and Shedler 1979)."""

    def load(random: Random) -> Iterator[Request]:
        now = 0.0
        while most > 0:
            now += random.expovariate(most)
            if random.random() * most < rate(now):
                yield mix.draw(now, random)

    return load


Row = tuple[float, int, int, int]
"""A row of a trace: arrival (s), tier, prompt tokens, generated tokens."""


def trace(rows: Sequence[Row]) -> Callable[[Random], Iterator[Request]]:
    """Return a load that repeats a trace as it is."""

    def load(_: Random) -> Iterator[Request]:
        for arrived, tier, prompt, generated in rows:
            yield Request(arrived, tier, prompt, generated)

    return load


def scaled(rows: Sequence[Row], factor: float) -> Callable[[Random], Iterator[Request]]:
    """Return a load of `factor` times the trace: whole shifted copies keep bursts, a rest is thinned.

    Copies are shifted by random times within the trace, so each seed gives another superposition.
    """
    span = rows[-1][0] + 1e-3 if rows else 0.0

    def load(random: Random) -> Iterator[Request]:
        whole = math.floor(factor)
        chosen: list[Row] = []
        for copy in range(whole):
            shift = random.uniform(0.0, span) if copy or factor != 1.0 else 0.0
            chosen += [((t + shift) % span, tier, p, g) for t, tier, p, g in rows]
        rest = factor - whole
        if rest > 1e-9:
            shift = random.uniform(0.0, span)
            chosen += [
                ((t + shift) % span, tier, p, g) for t, tier, p, g in rows if random.random() < rest
            ]
        chosen.sort()
        for row in chosen:
            yield Request(*row)

    return load


class StockRequest(Request):
    """A request to a stock engine, which knows no tiers: all are standard there. `asked`: its tier."""

    __slots__ = ("asked",)

    def __init__(self, request: Request) -> None:
        super().__init__(request.arrived, 1, request.prompt, request.generated)
        self.asked = request.tier


def untiered(
    load: Callable[[Random], Iterator[Request]],
) -> Callable[[Random], Iterator[Request]]:
    """Return the same load for stock engines, which serve requests in the order of arrival."""
    return lambda random: map(StockRequest, load(random))


def retiered(
    load: Callable[[Random], Iterator[Request]], tiers: tuple[float, float, float]
) -> Callable[[Random], Iterator[Request]]:
    """Return the same load with tiers at random: shares of realtime, standard and batch."""

    def changed(random: Random) -> Iterator[Request]:
        for request in load(random):
            request.tier = random.choices((0, 1, 2), tiers)[0]
            yield request

    return changed
