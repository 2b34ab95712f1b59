"""The fit of step times: known coefficients come back, and no coefficient is negative."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fit_step_times import Steps, fit_steps, non_negative_least_squares


def test_a_fit_recovers_the_coefficients_and_the_knee() -> None:
    random = np.random.default_rng(3)
    size = 150
    prefill = np.where(np.arange(size) % 2, 0.0, random.uniform(64, 8192, size))
    sequences = random.integers(1, 512, size).astype(float)
    exact = Steps(
        kinds=np.full(size, "mixed"),
        prefill=prefill,
        sequences=sequences,
        kv=sequences * random.uniform(256, 8192, size),
        pairs=prefill * prefill / 2,
        time_ms=np.zeros(size),
    )
    truth = np.array([2.5, 0.02, 0.005, 4.1e-5, 9e-7])
    time_ms = exact.features(200.0) @ truth
    fit = fit_steps(Steps(exact.kinds, prefill, sequences, exact.kv, exact.pairs, time_ms))
    assert fit.knee == pytest.approx(200.0, rel=0.02)
    assert fit.coefficients == pytest.approx(truth, rel=0.03)
    assert fit.errors.max() < 0.005


def test_a_column_that_only_helps_with_a_negative_weight_gets_none() -> None:
    a = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    error, x = non_negative_least_squares(a, np.array([3.0, 2.0, 1.0]))
    assert x == pytest.approx([2.0, 0.0])
    assert error == pytest.approx(2.0)


@pytest.mark.exhaustive
@given(
    rows=st.lists(st.tuples(*[st.floats(0.1, 10)] * 4), min_size=4, max_size=12),
    weights=st.tuples(*[st.floats(0, 2)] * 3),
)
def test_no_other_weights_are_better(
    rows: list[tuple[float, ...]], weights: tuple[float, ...]
) -> None:
    data = np.array(rows)
    a, b = data[:, :3], data[:, 3]
    error, x = non_negative_least_squares(a, b)
    assert (x >= 0).all()
    assert error == pytest.approx(float(((a @ x - b) ** 2).sum()))
    assert error <= float(((a @ np.array(weights) - b) ** 2).sum()) + 1e-9
