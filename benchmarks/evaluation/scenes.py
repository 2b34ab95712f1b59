"""The scenes of the evaluation: a load, a model on its GPUs, and whether the load is steady.

A scene counts as steady if the 95th percentile of its 5-minute rates is below 1.5 times their mean. All
patterns are synthetic; `conversation` and `clients` replay samples of public traces, which are read
from a directory that the command names.
"""

from __future__ import annotations

import csv
import gzip
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from fleetkeeper.simulate.closed_loop import Load
from fleetkeeper.simulate.cluster import ColdStart
from fleetkeeper.simulate.engine import EngineSpec
from fleetkeeper.simulate.loads.arrivals import Row, retiered, scaled
from fleetkeeper.simulate.requests import Request
from fleetkeeper_steps.hardware import known_hardware

HOUR: Final = 3600.0
MAX_S: Final = 8 * HOUR
H100_8B: Final = EngineSpec(
    known_hardware()["h100-8b"].costs, known_hardware()["h100-8b"].kv_capacity_tokens
)
H100_70B: Final = EngineSpec(
    known_hardware()["h100-70b"].costs, known_hardware()["h100-70b"].kv_capacity_tokens
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
FIFTH_BATCH: Final = (0.0, 0.8, 0.2)
"""Shares of the tiers realtime, standard and batch."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A load on a model. `gpus`: of a replica. It starts with so many `replicas`."""

    name: str
    hours: float
    load: Load
    engine: EngineSpec = H100_70B
    gpus: int = 4
    cold_start: ColdStart = START_70B
    max_replicas: int = 12
    replicas: int = 1


Rate = Callable[[Random], tuple[Callable[[float], float], float]]
"""A random rate: draws a function of time, and a bound of it."""


def modulated(rate: Rate, lengths: Lengths) -> Load:
    """Return Poisson arrivals (by thinning) whose rate is a function of time, drawn once for each run."""

    def load(random: Random) -> Iterator[Request]:
        current, most = rate(random)
        now = 0.0
        while True:
            now += random.expovariate(most)
            if random.random() * most < current(now):
                yield Request(now, 1, *lengths.draw(random))

    return load


def wave(mean: float, swing: float, period_s: float) -> Rate:
    """Return a rate that swings by a share around its mean, with a random phase."""

    def draw(random: Random) -> tuple[Callable[[float], float], float]:
        phase = random.uniform(0, 2 * math.pi)
        most = mean * (1 + swing)
        return lambda t: mean * (1 + swing * math.sin(2 * math.pi * t / period_s + phase)), most

    return draw


def jitter(mean: float, sigma: float, slot_s: float = 60.0) -> Rate:
    """Return a rate that changes every slot: an autoregressive lognormal, as of many clients."""

    def draw(random: Random) -> tuple[Callable[[float], float], float]:
        level, values = 0.0, []
        for _ in range(int(MAX_S / slot_s)):
            level = 0.8 * level + 0.6 * random.gauss(0, sigma)
            values.append(min(3 * mean, mean * math.exp(level - sigma * sigma / 2)))
        return lambda t: values[int(t / slot_s)], max(values)

    return draw


def steps(base: float, high: float, begin_s: float, end_s: float) -> Rate:
    """Return a rate that is `high` between two times."""
    return lambda _: (lambda t: high if begin_s <= t < end_s else base, high)


def ramp(base: float, high: float, until_s: float) -> Rate:
    """Return a rate that rises steadily until a time, and stays."""
    return lambda _: (lambda t: base + (high - base) * min(1.0, t / until_s), high)


def bursts(base: float, high: float, every_s: float, long_s: float) -> Rate:
    """Return a rate with bursts of random length at random times, `every_s` apart on average."""

    def draw(random: Random) -> tuple[Callable[[float], float], float]:
        starts, ends, tops, at = [], [], [], 0.0
        while at < MAX_S:
            at += random.uniform(0.5, 1.5) * every_s
            starts.append(at)
            ends.append(at + random.uniform(0.5, 1.5) * long_s)
            tops.append(random.uniform(0.7, 1.0) * high)

        def rate(t: float) -> float:
            index = bisect_right(starts, t) - 1
            return tops[index] if index >= 0 and t < ends[index] else base

        return rate, high

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
        end_s = begin_s + seconds
        rows = [
            (t - begin_s, tier, p, g) for t, tier, p, g in read_rows(path) if begin_s <= t < end_s
        ]
        yield from scaled(rows, factor)(random)

    return load


def scenes(traces: Path | None) -> list[Scene]:
    """Return all scenes; those of public traces only with their directory."""
    rows = [
        Scene("chat", 2, modulated(jitter(13, 0.12), CHAT)),
        Scene("chat, morning", 3, modulated(wave(11, 0.3, 8 * HOUR), CHAT)),
        Scene("chat, quiet", 2, modulated(jitter(4, 0.15), CHAT)),
        Scene("long outputs", 2, modulated(jitter(6, 0.12), REASONING), max_replicas=16),
        Scene("enterprise, 70B", 2, modulated(jitter(3.2, 0.2), ENTERPRISE)),
        small("enterprise, 8B", 2, modulated(jitter(6, 0.2), ENTERPRISE)),
        Scene("code completion", 2, modulated(jitter(2.4, 0.2), CODE)),
        small("code completion, 8B", 2, modulated(jitter(12, 0.15), CODE)),
        Scene("step x3", 1, modulated(steps(4, 12, 1200, 2400), CHAT)),
        Scene("bursts of 1 min", 2, modulated(bursts(5, 30, 600, 60), CHAT)),
        Scene("bursts of 3 min", 2, modulated(bursts(5, 25, 900, 180), CHAT)),
        small("bursts, 8B", 2, modulated(bursts(8, 35, 900, 90), SHORT)),
        Scene("ramp", 2, modulated(ramp(3, 25, 5400), CHAT)),
        Scene("chat, 20% batch", 2, retiered(modulated(jitter(9, 0.12), CHAT), FIFTH_BATCH)),
        Scene(
            "step x3, 20% batch",
            1,
            retiered(modulated(steps(4, 12, 1200, 2400), CHAT), FIFTH_BATCH),
        ),
    ]
    if traces is not None:
        conversation = traces / "azure2023_conv.csv.gz"
        clients = traces / "servegen_m-small_day2_2rps.csv.gz"
        rows += [
            Scene("conversation", 0.97, part(conversation, 0, 3501, 1.0)),
            Scene("conversation x3", 0.97, part(conversation, 0, 3501, 3.0)),
            small("clients, 8B", 4, part(clients, 6 * HOUR, 4 * HOUR, 4.0)),
        ]
    return rows


def small(name: str, hours: float, load: Load) -> Scene:
    """Return a scene of the 8B model on one GPU."""
    return Scene(name, hours, load, H100_8B, 1, START_8B)


def rates(load: Load, seconds: float, seed: int) -> Sequence[float]:
    """Return the arrivals per second in slots of five minutes."""
    slots = [0.0] * math.ceil(seconds / 300.0)
    for request in load(Random(seed)):
        if request.arrived >= seconds:
            break
        slots[int(request.arrived / 300.0)] += 1 / 300.0
    return slots
