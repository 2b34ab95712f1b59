"""The scenes of the evaluation: a load, a model on its GPUs, and whether the load is steady.

A scene is steady if the 95th percentile of its 5-minute rates is below 1.5 times their mean. All
patterns are synthetic; `conversation` and `clients` replay samples of public traces, which are read
from a directory that the command names.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.closed_loop import Load
from fleetkeeper.simulate.engine import EngineSpec, StepCosts
from fleetkeeper.simulate.loads import Row, scaled
from fleetkeeper.simulate.requests import Request

HOUR: Final = 3600.0
H100_8B: Final = EngineSpec(
    StepCosts(0.00246, 0.00408, 1.98e-5, 5.34e-6, 4.1e-8, 9.0e-13), kv_capacity_tokens=400_000.0
)
H100_70B: Final = EngineSpec(
    StepCosts(0.00588, 0.00992, 6.17e-5, 7.92e-6, 2.86e-8, 1.1e-12), kv_capacity_tokens=420_000.0
)
START_8B: Final = ColdStart(75.0, 0.25, 0.1, 3.0)
START_70B: Final = ColdStart(180.0, 0.25, 0.1, 3.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal prompt and output tokens: means, and sigmas of the logarithms."""

    prompt: float
    output: float
    prompt_sigma: float = 0.9
    output_sigma: float = 0.7

    def draw(self, random: Random) -> tuple[int, int]:
        """Return the tokens of one request, at most 16 times the mean."""
        sizes = []
        for mean, sigma in ((self.prompt, self.prompt_sigma), (self.output, self.output_sigma)):
            value = mean * math.exp(sigma * random.gauss(0, 1) - sigma * sigma / 2)
            sizes.append(max(1, round(min(value, 16 * mean))))
        return sizes[0], sizes[1]


CHAT: Final = Lengths(1150, 210)
CODE: Final = Lengths(2050, 28, 0.8, 0.8)
REASONING: Final = Lengths(450, 1600, 0.8, 0.6)
ENTERPRISE: Final = Lengths(1600, 320, 1.1, 0.9)
SHORT: Final = Lengths(180, 160)


@dataclass(frozen=True, slots=True)
class Scene:
    """A load on a model. `gpus`: of a replica."""

    name: str
    hours: float
    load: Load
    engine: EngineSpec = H100_70B
    gpus: int = 4
    cold_start: ColdStart = START_70B
    max_replicas: int = 12
    is_steady: bool = True
    replicas: int = 1


def modulated(
    rate: Callable[[float, Random], Callable[[float], float]], most: float, lengths: Lengths
) -> Load:
    """Return arrivals whose rate is a random function of time, drawn once for each run."""

    def load(random: Random) -> Iterator[Request]:
        current = rate(0.0, random)
        now = 0.0
        while True:
            now += random.expovariate(most)
            if random.random() * most < current(now):
                yield Request(now, 1, *lengths.draw(random))

    return load


def wave(mean: float, swing: float, period_s: float) -> Callable[[float, Random], Callable[[float], float]]:
    """Return a rate that swings by a share around its mean, with a random phase."""

    def draw(_: float, random: Random) -> Callable[[float], float]:
        phase = random.uniform(0, 2 * math.pi)
        return lambda t: mean * (1 + swing * math.sin(2 * math.pi * t / period_s + phase))

    return draw


def jitter(mean: float, sigma: float, slot_s: float = 60.0) -> Callable[[float, Random], Callable[[float], float]]:
    """Return a rate that changes every slot: an autoregressive lognormal, as of many clients."""

    def draw(_: float, random: Random) -> Callable[[float], float]:
        level, values = 0.0, []
        for _slot in range(int(8 * HOUR / slot_s)):
            level = 0.8 * level + 0.6 * random.gauss(0, sigma)
            values.append(mean * math.exp(level - sigma * sigma / 2))
        top = 3.0 * mean
        return lambda t: min(top, values[int(t / slot_s)])

    return draw


def steps(base: float, high: float, begin_s: float, end_s: float) -> Callable[[float, Random], Callable[[float], float]]:
    """Return a rate that is `high` between two times."""
    return lambda _, __: lambda t: high if begin_s <= t < end_s else base


def bursts(base: float, high: float, every_s: float, long_s: float) -> Callable[[float, Random], Callable[[float], float]]:
    """Return a rate with bursts of random length at random times, `every_s` apart on average."""

    def draw(_: float, random: Random) -> Callable[[float], float]:
        spans, at = [], 0.0
        while at < 8 * HOUR:
            at += random.uniform(0.5, 1.5) * every_s
            spans.append((at, at + random.uniform(0.5, 1.5) * long_s, random.uniform(0.7, 1.0) * high))
        found = [0]

        def rate(t: float) -> float:
            while spans[found[0]][1] < t:
                found[0] += 1
            begin, _end, top = spans[found[0]]
            return top if t >= begin else base

        return rate

    return draw


@cache
def read_rows(path: Path) -> tuple[Row, ...]:
    """Return the rows of a trace, all of tier standard."""
    with gzip.open(path, "rt") as lines:
        return tuple(
            (float(row["t_s"]), 1, int(row["input_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(lines)
        )


def part(path: Path, begin_s: float, seconds: float, factor: float) -> Load:
    """Return a part of a trace, superposed `factor` times."""

    def load(random: Random) -> Iterator[Request]:
        rows = [(t - begin_s, *rest) for t, *rest in read_rows(path) if begin_s <= t < begin_s + seconds]
        yield from scaled(rows, factor)(random)  # type: ignore[arg-type]

    return load


def scenes(traces: Path | None) -> list[Scene]:
    """Return all scenes; those of public traces only with their directory."""
    small = {"engine": H100_8B, "gpus": 1, "cold_start": START_8B}
    rows = [
        Scene("chat steady", 3, modulated(jitter(14, 0.12), 42, CHAT)),
        Scene("chat morning", 4, modulated(wave(12, 0.3, 8 * HOUR), 20, CHAT)),
        Scene("chat quiet", 2, modulated(jitter(4, 0.15), 12, CHAT)),
        Scene("long outputs", 3, modulated(jitter(6, 0.12), 18, REASONING), max_replicas=16),
        Scene("enterprise 70B", 3, modulated(jitter(3.5, 0.2), 11, ENTERPRISE)),
        Scene("enterprise 8B", 3, modulated(jitter(6, 0.2), 18, ENTERPRISE), **small),  # type: ignore[arg-type]
        Scene("code", 3, modulated(jitter(2.6, 0.2), 8, CODE)),
        Scene("code busy 8B", 3, modulated(jitter(30, 0.15), 90, CODE), **small),  # type: ignore[arg-type]
        Scene("step x3", 1, modulated(steps(7, 21, 1200, 2400), 21, CHAT), is_steady=False, replicas=1),
        Scene("bursts 1 min", 2, modulated(bursts(5, 30, 600, 60), 30, CHAT), is_steady=False),
        Scene("bursts 3 min", 2, modulated(bursts(5, 25, 900, 180), 25, CHAT), is_steady=False),
        Scene("bursts 8B", 2, modulated(bursts(15, 120, 900, 90), 120, SHORT), is_steady=False, **small),  # type: ignore[arg-type]
        Scene("ramp", 2, modulated(lambda _, __: lambda t: 3 + 22 * min(1.0, t / 5400), 25, CHAT), is_steady=False),
    ]
    if traces is not None:
        conversation = traces / "azure2023_conv.csv.gz"
        clients = traces / "servegen_m-small_day2_2rps.csv.gz"
        rows += [
            Scene("conversation x1", 0.97, part(conversation, 0, 3501, 1.0)),
            Scene("conversation x3", 0.97, part(conversation, 0, 3501, 3.0)),
            Scene("clients day 8B", 6, part(clients, 6 * HOUR, 6 * HOUR, 8.0), **small),  # type: ignore[arg-type]
        ]
    return rows


def rates(load: Load, seconds: float, seed: int) -> Sequence[float]:
    """Return the arrivals per second in slots of five minutes."""
    slots = [0.0] * math.ceil(seconds / 300.0)
    for request in load(Random(seed)):
        if request.arrived >= seconds:
            break
        slots[int(request.arrived / 300.0)] += 1 / 300.0
    return slots
