"""The plan of which requests to send when: pure, seeded, without a clock."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

FIRST_PROMPT_TOKEN = 10
PROMPT_TOKEN_RANGE = 900
DEFAULT_TIERS: Mapping[str, float] = {"realtime": 0.3, "standard": 0.5, "batch": 0.2}


@dataclass(frozen=True, slots=True)
class Phase:
    """A period of `seconds` with an average of `rate_per_s` requests per second (Poisson)."""

    name: str
    seconds: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """The mix of requests: tiers by weight, lengths in tokens drawn uniformly from a range."""

    tiers: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_TIERS))
    prompt_tokens: tuple[int, int] = (16, 64)
    output_tokens: tuple[int, int] = (16, 64)
    sessions: int = 32


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to send `at_s` seconds after the start. An empty tier is not sent."""

    number: int
    at_s: float
    phase: str
    tier: str
    session: str
    prompt_tokens: int
    output_tokens: int

    @property
    def prompt(self) -> list[int]:
        """Return a prompt of exactly the planned number of tokens, different for each request.

        It consists of token ids, not text: lengths are exact, and no prefix cache can help.
        """
        return [
            FIRST_PROMPT_TOKEN + (self.number * 31 + position * 7) % PROMPT_TOKEN_RANGE
            for position in range(self.prompt_tokens)
        ]


def _times(phases: Sequence[Phase], rng: random.Random) -> Iterator[tuple[float, Phase]]:
    """Yield Poisson arrivals: exponential gaps with the phase's rate, restarted in each phase."""
    starts = accumulate((phase.seconds for phase in phases), initial=0.0)
    for start, phase in zip(starts, phases, strict=False):
        at_s = start
        while phase.rate_per_s > 0:
            at_s += rng.expovariate(phase.rate_per_s)
            if at_s >= start + phase.seconds:
                break
            yield at_s, phase


def plan_arrivals(phases: Sequence[Phase], shape: Shape, seed: int) -> tuple[Arrival, ...]:
    """Return all requests of a run in order of time; the same seed gives the same run.

    Raises:
        ValueError: a phase has no length, a rate is negative, or no tier has a weight.
    """
    for phase in phases:
        if phase.seconds <= 0 or phase.rate_per_s < 0:
            raise ValueError(
                f"phase {phase.name!r}: seconds must be above 0 and the rate at least 0, "
                f"got {phase.seconds} and {phase.rate_per_s}"
            )
    if not any(weight > 0 for weight in shape.tiers.values()):
        raise ValueError("no tier has a weight above 0; give one, such as standard=1")
    rng = random.Random(seed)  # noqa: S311 - arrivals, not secrecy
    tiers, weights = list(shape.tiers), list(shape.tiers.values())
    return tuple(
        Arrival(
            number=number,
            at_s=at_s,
            phase=phase.name,
            tier=rng.choices(tiers, weights)[0],
            session=f"session-{rng.randrange(shape.sessions)}",
            prompt_tokens=rng.randint(*shape.prompt_tokens),
            output_tokens=rng.randint(*shape.output_tokens),
        )
        for number, (at_s, phase) in enumerate(_times(phases, rng))
    )
