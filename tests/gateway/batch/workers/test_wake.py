"""When lines wake a service that sleeps, with clocks that the test moves."""

from __future__ import annotations

import pytest

from fleetkeeper_gateway.batch.interfaces import Route
from fleetkeeper_gateway.batch.workers.wake import wake_of, wakes_at
from tests.gateway.batch.workers.memory import batch_record

BATCH = batch_record(created=1000, expires=4600)


@pytest.mark.parametrize(
    ("start_p90_s", "at"),
    [
        (None, 2800),
        (0, 2800),
        (900, 2800),
        (901, 2798),
        (1200, 2200),
        (1800, 1000),
        (10_000, -15_400),
    ],
)
def test_half_of_the_window_may_pass_or_less_if_two_starts_would_not_fit(
    start_p90_s: int | None, at: float
) -> None:
    assert wakes_at(BATCH, start_p90_s) == at


def test_half_of_an_odd_window_is_exact() -> None:
    assert wakes_at(batch_record(created=1000, expires=1301), None) == 1150.5


@pytest.mark.parametrize(
    ("route", "now", "wake"),
    [
        (Route("s"), 2799.9, None),
        (Route("s"), 2800.0, "deadline"),
        (Route("s", start_p90_s=1200), 2199.9, None),
        (Route("s", start_p90_s=1200), 2200.0, "deadline"),
        (Route("s", "always"), 1000.0, "always"),
        (Route("s", "always"), 4000.0, "always"),
        (Route("s", "deadline"), 1000.0, "deadline"),
    ],
)
def test_the_header_of_a_line_is_that_of_its_service_or_of_its_batch(
    route: Route, now: float, wake: str | None
) -> None:
    assert wake_of(BATCH, route, now) == wake
