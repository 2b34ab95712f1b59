"""A summary of a run: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fleetkeeper_local.load.open_loop import Sample

SHED_CAUSE = "http_429"


@dataclass(frozen=True, slots=True)
class Row:
    """The requests of one group. Shed = refused with 429 after all retries; not a failure.

    Quantiles cover the requests that succeeded, in seconds from the intended send time.
    """

    name: str
    requests: int
    succeeded: int
    shed: int
    failed: dict[str, int]
    p50_s: float | None
    p95_s: float | None
    first_token_p95_s: float | None
    tokens: int
    repeated: int = 0
    """Requests that succeeded at a later attempt."""

    @property
    def failures(self) -> int:
        """Requests that neither succeeded nor were shed."""
        return sum(self.failed.values())


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank quantile; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _row(name: str, samples: Sequence[Sample]) -> Row:
    good = [sample for sample in samples if sample.outcome.ok]
    causes = Counter(sample.outcome.cause for sample in samples if not sample.outcome.ok)
    latencies = [sample.latency_s for sample in good]
    firsts = [sample.first_token_s for sample in good if sample.first_token_s is not None]
    return Row(
        name=name,
        requests=len(samples),
        succeeded=len(good),
        shed=causes.pop(SHED_CAUSE, 0),
        failed=dict(sorted(causes.items())),
        p50_s=quantile(latencies, 0.50),
        p95_s=quantile(latencies, 0.95),
        first_token_p95_s=quantile(firsts, 0.95),
        tokens=sum(sample.outcome.tokens for sample in good),
        repeated=sum(sample.outcome.attempts > 1 for sample in good),
    )


def summarise(
    samples: Iterable[Sample], by: Callable[[Sample], str] = lambda sample: sample.arrival.tier
) -> list[Row]:
    """Return one row per group in order of first appearance, and a last row `all`."""
    everything = list(samples)
    groups: dict[str, list[Sample]] = {}
    for sample in everything:
        groups.setdefault(by(sample), []).append(sample)
    return [*(_row(name, group) for name, group in groups.items()), _row("all", everything)]
