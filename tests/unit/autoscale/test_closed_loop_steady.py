"""The loop closed over modeled engines: what a steady load and a surge leave as they are."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fleetkeeper.autoscale.types import ControlSettings
from fleetkeeper.simulate.engine import H100_70B
from tests.support.autoscale.simulated import Case, Record, played
from tests.support.lanes import keep_first

SETTINGS = ControlSettings(max_replicas=8, scale_down_delay_s=300.0)


def code_completion(rate: float, seed: int) -> Record:
    """Play an hour of prefill: 2,050 prompt tokens and 28 generated ones per request, 70B."""
    return played(
        Case(
            3600,
            lambda _: rate,
            SETTINGS,
            H100_70B,
            replicas=1,
            prompt=2050.0,
            generated=28.0,
            seed=seed,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", keep_first(1, [1, 7], pytest.mark.exhaustive))
@pytest.mark.parametrize(
    ("rate", "attained"), [(0.5, 0.97), pytest.param(2.6, 0.93, marks=pytest.mark.exhaustive)]
)
def test_a_quiet_engine_keeps_its_sequences(rate: float, attained: float, seed: int) -> None:
    """Few run although prompts wait for one another. One replica carries even 2.6 requests/s."""
    record = code_completion(rate, seed)
    assert not record.replica_changes()
    assert record.outcome.total_refused == 0
    assert {tick.sequences for tick in record.ticks} == {256}
    tokens = [tick.tokens for tick in record.ticks]
    assert tokens == sorted(tokens, reverse=True), "only long steps lower them"
    assert record.outcome.wait_attainment >= attained
    assert record.outcome.batch_attainment >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "replicas"), [(6.0, 1), pytest.param(12.0, 2, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("seed", keep_first(1, [1, 7], pytest.mark.exhaustive))
def test_steady_chat_turns_at_most_once_an_hour(rate: float, replicas: int, seed: int) -> None:
    """1,000 + 200 tokens: replicas stay, limits settle, and the objective is attained."""
    record = played(Case(3600, lambda _: rate, SETTINGS, H100_70B, replicas=replicas, seed=seed))
    turns = 0
    for values in (
        [tick.replicas for tick in record.ticks],
        [tick.sequences for tick in record.ticks],
        [tick.tokens for tick in record.ticks],
    ):
        moves = [b - a for a, b in pairwise(values) if a != b]
        turns += sum((a > 0) != (b > 0) for a, b in pairwise(moves))
    assert turns <= 1
    assert not record.replica_changes()
    assert record.outcome.wait_attainment >= 0.95
    assert record.outcome.batch_attainment >= 0.95


@pytest.mark.slow
def test_a_surge_keeps_its_replicas_for_four_delays() -> None:
    """Five minutes of 24 requests/s: three replicas, for 20 minutes after the last of them was needed."""
    record = played(
        Case(
            3000,
            lambda t: 24.0 if 600 <= t < 900 else 5.0,
            SETTINGS,
            H100_70B,
            replicas=1,
            cold_start_s=120.0,
        )
    )
    assert record.outcome.most_replicas == 3
    lowered = [time for time, by in record.replica_changes() if by < 0]
    assert len(lowered) == 2
    assert 900 + 4 * SETTINGS.scale_down_delay_s - 60 <= lowered[0] <= 2400
    assert record.ticks[-1].replicas == 1
    blocked = [tick for tick in record.ticks if 1300 <= tick.time < 2000]
    assert {tick.decision.replicas.reason for tick in blocked} == {"ScaleDownBlocked"}
