"""Least squares, the step-time model and the targets that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.autoscale.capacity.least_squares import (
    Fit,
    pseudo_observations,
    unknown_fit,
    updated,
)
from fleetkeeper.autoscale.capacity.step_time_model import StepModel, StepTime, learned
from fleetkeeper.autoscale.capacity.targets import (
    Shape,
    Targets,
    capacity_of,
    decide_targets,
    kv_sequences,
    mean_step_s,
    most_sequences,
    moved_notch,
    notch_down,
    notches,
    prefill_wait_ratio,
    prefill_wait_s,
    promptly_served,
)
from fleetkeeper.autoscale.constants import COVARIANCE_MAX, MODEL_WINDOWS, TOKEN_NOTCHES
from fleetkeeper.autoscale.signals.samples import Counters, Gauges
from fleetkeeper.autoscale.signals.service_signals import Signals
from fleetkeeper.autoscale.signals.windows import Window
from fleetkeeper.autoscale.types import ControlSettings, Grade
from fleetkeeper_contract.step_terms import StepSums
from tests.support.lanes import examples

CALIBRATED = {
    "8B on A100": StepTime(7.807e-3, 4.184e-3, 5.4525e-5, 2.2447e-6, 83.1e-9),
    "8B on H100": StepTime(2.463e-3, 4.077e-3, 1.9803e-5, 5.338e-6, 41.02e-9),
    "32B on A100x2": StepTime(19.242e-3, 6.443e-3, 1.24661e-4, 0.0, 88.37e-9),
    "32B on H100x2": StepTime(4.978e-3, 9.105e-3, 4.979e-5, 6.405e-6, 43.65e-9),
    "32B on H200": StepTime(4.012e-3, 15.672e-3, 8.911e-5, 1.0463e-5, 60.83e-9),
    "70B on A100x4": StepTime(18.451e-3, 10.604e-3, 1.52152e-4, 7.494e-6, 61.72e-9),
    "70B on H100x4": StepTime(5.885e-3, 9.921e-3, 6.1715e-5, 7.919e-6, 28.57e-9),
    "70B on H200x2": StepTime(3.907e-3, 17.668e-3, 1.0361e-4, 1.0155e-5, 37.43e-9),
}
"""Kernel times of measured models (calibration figures, rounded)."""

CHAT = Shape(1000.0, 200.0, 2048.0)
COMPLETION = Shape(2050.0, 28.0, 8192.0)


def sums_of(rows: list[tuple[float, float, float, float]]) -> StepSums:
    """Sums over steps given as (prefill, sequences, kv, seconds)."""
    total = [0.0] * len(StepSums._fields)
    for p, b, k, y in rows:
        products = (
            1,
            p,
            b,
            k,
            y,
            p * p,
            p * b,
            p * k,
            p * y,
            b * b,
            b * k,
            b * y,
            k * k,
            k * y,
            y * y,
        )
        total = [before + more for before, more in zip(total, products, strict=True)]
    return StepSums._make(total)


def window_of(
    truth: StepTime,
    random: Random,
    *,
    load: float = 0.5,
    steps: int = 200,
    noise: float = 0.05,
    number: int = 0,
) -> Window:
    """A window of steps around a load: half decode-only, half bearing prefill."""
    decode: list[tuple[float, float, float, float]] = []
    prefill: list[tuple[float, float, float, float]] = []
    for i in range(steps):
        b = max(1.0, random.gauss(128 * load, 20))
        k = b * random.uniform(600, 1400)
        p = 0.0 if i % 2 else random.uniform(200, 2000)
        y = truth.batch_time_s(p, b, k) * math.exp(random.gauss(0, noise))
        (prefill if p else decode).append((p, b, k, y))
    return Window(
        1000.0 + 10 * number,
        1010.0 + 10 * number,
        steps=steps,
        decode=sums_of(decode),
        prefill=sums_of(prefill),
    )


def fitted(truth: StepTime, windows: int = 40, seed: int = 1) -> StepModel:
    """A model after windows at loads that wander between a tenth and all of the batch."""
    random, model = Random(seed), StepModel()
    for number in range(windows):
        load = 0.55 + 0.45 * math.sin(number / 4)
        model = learned(model, window_of(truth, random, load=load, number=number))
    return model


@pytest.mark.parametrize("name", CALIBRATED)
def test_fit_predicts_within_fifteen_percent(name: str) -> None:
    """For every calibrated model: decode-only and prefill-bearing steps at several loads."""
    truth, time = CALIBRATED[name], fitted(CALIBRATED[name]).step_time
    for b in (16, 64, 128):
        for p in (0, 512, 2048):
            want = truth.batch_time_s(p, b, b * 1000)
            assert time.batch_time_s(p, b, b * 1000) == pytest.approx(want, rel=0.15)


@pytest.mark.parametrize("name", CALIBRATED)
def test_coefficients_are_never_negative(name: str) -> None:
    """Also with noise that a plain fit would follow below zero."""
    random, model = Random(7), StepModel()
    for number in range(30):
        window = window_of(CALIBRATED[name], random, noise=0.3, number=number)
        model = learned(model, window)
        time = model.step_time
        assert min(time.t0_s, time.w_s, time.g_s, time.b_s, time.c_s) >= 0


def test_model_is_known_after_200_steps_of_a_class() -> None:
    """Before that it is not used."""
    truth, random = CALIBRATED["8B on H100"], Random(1)
    model = learned(StepModel(), window_of(truth, random, steps=300))
    assert not model.knows_decode
    model = learned(model, window_of(truth, random, steps=300))
    assert model.knows_decode


def test_steady_load_excites_one_direction_only() -> None:
    """100 equal steps give one row: the slope is not updated, and not forgotten."""
    rows = pseudo_observations(((100.0, 10.0), (10.0, 1.0)), (500.0, 50.0))
    assert len(rows) == 1


def test_unexcited_directions_are_not_forgotten() -> None:
    """Hours at one load leave the slope's variance where it was (no wind-up)."""
    fit, random = unknown_fit(2), Random(3)
    for _ in range(30):
        xs = [random.uniform(0, 2) for _ in range(50)]
        fit, _ = feed(fit, xs, lambda x: 5 + 3 * x, random)
    slope, spread = fit.coefficients[1], fit.covariance[1][1]
    for _ in range(2000):
        fit, _ = feed(fit, [1.0] * 50, lambda x: 5 + 3 * x, random)
    assert fit.coefficients[1] == pytest.approx(slope, abs=0.5)
    assert fit.covariance[1][1] < max(100 * spread, 1.0)
    assert fit.covariance[1][1] < COVARIANCE_MAX / 1000


def feed(
    fit: Fit, xs: list[float], truth: Callable[[float], float], random: Random
) -> tuple[Fit, float]:
    """One batch of noisy observations."""
    ys = [truth(x) * math.exp(random.gauss(0, 0.03)) for x in xs]
    sxx = ((float(len(xs)), sum(xs)), (sum(xs), sum(x * x for x in xs)))
    sxy = (sum(ys), sum(x * y for x, y in zip(xs, ys, strict=True)))
    return updated(fit, float(len(xs)), sxx, sxy, sum(y * y for y in ys))


def test_an_outlier_is_refused_and_a_lasting_change_is_learned() -> None:
    """One window twice as slow changes nothing; a lasting change is taken after six refusals."""
    truth = CALIBRATED["8B on H100"]
    slow = StepTime(
        *(3 * value for value in (truth.t0_s, truth.w_s, truth.g_s, truth.b_s, truth.c_s))
    )
    model, random = fitted(truth), Random(5)
    once = learned(model, window_of(slow, random))
    assert once.decode.coefficients == model.decode.coefficients
    assert once.decode.refused == 1
    for _ in range(12):
        model = learned(model, window_of(slow, random))
    assert model.step_time.batch_time_s(0, 64, 64_000) == pytest.approx(
        slow.batch_time_s(0, 64, 64_000), rel=0.15
    )


def test_a_model_that_misses_by_half_is_counted() -> None:
    """The control breaker opens after five windows in a row."""
    truth = CALIBRATED["8B on H100"]
    slow = StepTime(
        *(3 * value for value in (truth.t0_s, truth.w_s, truth.g_s, truth.b_s, truth.c_s))
    )
    model, random = fitted(truth), Random(5)
    for _ in range(MODEL_WINDOWS):
        model = learned(model, window_of(slow, random))
    assert model.off_windows >= MODEL_WINDOWS


def test_a_model_learned_from_warm_up_steps_is_doubted_not_called_off() -> None:
    """The first windows are ten times too slow: no target follows them, the breaker stays closed, and the model learns."""
    truth = CALIBRATED["8B on H100"]
    warm_up = StepTime(
        *(10 * value for value in (truth.t0_s, truth.w_s, truth.g_s, truth.b_s, truth.c_s))
    )
    model, random, doubted = StepModel(), Random(5), 0
    for number in range(3):
        model = learned(model, window_of(warm_up, random, number=number))
    for number in range(3, 30):
        load = 0.55 + 0.45 * math.sin(number / 4)
        model = learned(model, window_of(truth, random, load=load, number=number))
        doubted += model.is_doubted
        assert model.off_windows == 0
    assert doubted >= MODEL_WINDOWS
    assert model.is_proven
    assert not model.is_doubted


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        (0, 256),
        (255, 256),
        (256, 256),
        (383, 256),
        (511, 384),
        (512, 512),
        (1000, 768),
        (1024, 1024),
        (1535, 1280),
        (5000, 4096),
        (8192, 8192),
        (1e9, 8192),
    ],
)
def test_tokens_are_rounded_down_to_a_notch(tokens: float, want: int) -> None:
    """Never above what was computed, never outside the bounds."""
    assert notch_down(tokens, ControlSettings()) == want


BOUNDS = [
    (low, high)
    for low in (64, 256, 300, 1000)
    for high in (256, 300, 2048, 5000, 16384)
    if low <= high
]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_notches_begin_and_end_at_the_bounds(low: int, high: int) -> None:
    """And move by one in both directions, stopping at the ends."""
    bounds = ControlSettings(min_tokens=low, max_tokens=high)
    allowed = notches(bounds)
    assert allowed[0] == (min(high, low))
    assert allowed[-1] == high
    assert list(allowed) == sorted(set(allowed))
    assert moved_notch(high, 1, bounds) == high
    assert moved_notch(allowed[0], -1, bounds) == allowed[0]
    assert set(allowed[1:-1]) <= set(TOKEN_NOTCHES)


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("objective_ms", [25, 40, 50, 75, 100, 200])
def test_capacity_keeps_nine_tenths_of_the_objective(name: str, objective_ms: int) -> None:
    """C* sequences stay within it; one more notch would not (or a bound is reached). 0: not even one does."""
    bounds = ControlSettings(batch_time_objective_s=objective_ms / 1e3)
    truth = CALIBRATED[name]
    n = capacity_of(truth, bounds, CHAT, 400_000)

    def step_s(count: float) -> float:
        return mean_step_s(truth, count, CHAT)

    limit_s = 0.9 * objective_ms / 1e3
    assert (n == 0) is (step_s(1) > limit_s)
    assert n == 0 or 1 <= n <= min(256, 0.9 * 400_000 / 1100)
    assert n == 0 or step_s(n) <= limit_s + 1e-9
    assert n >= 256 or n >= 0.9 * 400_000 / 1100 - 1 or step_s(n + 1) > limit_s


@given(st.floats(10, 8000), st.floats(10, 2000), st.floats(0.01, 0.2), st.floats(0.01, 0.2))
@examples(100)
def test_capacity_grows_with_the_objective(
    prompt: float, generated: float, a: float, b: float
) -> None:
    """Monotone: a laxer objective never gives a smaller capacity."""
    truth = CALIBRATED["70B on H100x4"]
    low, high = sorted((a, b))
    shape = Shape(prompt, generated, 2048.0)
    small = capacity_of(truth, ControlSettings(batch_time_objective_s=low), shape, 4e5)
    large = capacity_of(truth, ControlSettings(batch_time_objective_s=high), shape, 4e5)
    assert large >= small - 0.26


def signals_of(prompt: float = 1000.0, generated: float = 200.0) -> Signals:
    """Fresh signals of two pods."""
    return Signals(
        Grade.FRESH,
        1.0,
        2,
        2,
        rates=Counters(),
        gauges=Gauges(kv_capacity_tokens=800_000.0),
        prompt_tokens=prompt,
        generation_tokens=generated,
    )


@pytest.mark.parametrize("name", CALIBRATED)
def test_targets_lie_within_bounds(name: str) -> None:
    """T* on a notch, M* at least the floor and at most the start-up value, C* positive."""
    bounds = ControlSettings(min_sequences=8, max_sequences=128)
    targets = decide_targets(fitted(CALIBRATED[name]), signals_of(), bounds)
    assert targets is not None
    assert targets.tokens in notches(bounds)
    assert 8 <= targets.sequences <= 128
    assert 1 <= targets.capacity <= 128
    assert targets.service_s(targets.capacity) > 0
    assert targets.carried_per_s > 0


def test_no_targets_without_a_model_or_requests() -> None:
    """Then it is measured AIMD."""
    assert decide_targets(StepModel(), signals_of(), ControlSettings()) is None
    model = fitted(CALIBRATED["8B on H100"])
    assert decide_targets(model, signals_of(generated=0.0), ControlSettings()) is None


def test_no_targets_where_no_batch_is_small_enough() -> None:
    """Fewer sequences would shorten nothing: the loop does not go to the floor for the model's sake."""
    model = fitted(CALIBRATED["70B on H100x4"])
    reachable = ControlSettings(batch_time_objective_s=0.05)
    assert decide_targets(model, signals_of(), reachable) is not None
    assert decide_targets(model, signals_of(), ControlSettings(batch_time_objective_s=0.01)) is None


def test_an_uncertain_model_gives_no_targets() -> None:
    """One load only, and the capacity lies far from it: the condition limit refuses."""
    random, model = Random(1), StepModel()
    for _window in range(10):
        rows = [(0.0, 4.0, 2000.0, 0.007 * math.exp(random.gauss(0, 0.05))) for _ in range(100)]
        model = learned(model, Window(0, 10, decode=sums_of(rows)))
    assert model.knows_decode
    assert not model.is_certain_at(200, 200_000)
    assert decide_targets(model, signals_of(), ControlSettings()) is None


@pytest.mark.parametrize(
    ("prompt", "generated", "capacity", "want"),
    [
        (1000, 200, 400_000, 187.3),
        (100, 100, 100_000, 343.4),
        (0, 0, 1e5, math.inf),
        (10, 10, 0, math.inf),
    ],
)
def test_guard_rail_by_kv(prompt: float, generated: float, capacity: float, want: float) -> None:
    """0.85 capacity / (I + O/2 + 1.3 sd), sd half of the mean."""
    assert kv_sequences(prompt, generated, capacity) == pytest.approx(want, rel=1e-3)


def test_worked_example_of_the_step_time() -> None:
    """T0 6 ms, w 10 ms, g 0.06 ms: 16 ms at 64 sequences, 40.6 ms with 512 prefill tokens."""
    time = StepTime(0.006, 0.010, 6e-5, 0.0, 0.0)
    assert time.batch_time_s(0, 64, 0) == pytest.approx(0.016)
    assert time.batch_time_s(512, 64, 0) == pytest.approx(0.04056)


def test_worked_example_of_the_mean_step() -> None:
    """Two sequences of code completion: 7% of the steps take 132 ms, the others 16 ms, the mean is 24 ms."""
    time = CALIBRATED["70B on H100x4"]
    without = time.batch_time_s(0, 2, 2 * COMPLETION.resident)
    whole = time.batch_time_s(2050, 2, 2 * COMPLETION.resident)
    assert without == pytest.approx(0.016, abs=0.0005)
    assert whole == pytest.approx(0.132, abs=0.001)
    assert mean_step_s(time, 2, COMPLETION) == pytest.approx(0.024, abs=0.0005)
    share = (mean_step_s(time, 2, COMPLETION) - without) / (whole - without)
    assert share == pytest.approx(0.07, abs=0.005)


def test_many_sequences_prefill_in_every_step() -> None:
    """50 sequences of chat bring 250 prompt tokens per step; a prompt of 1000 comes in one of four."""
    time = CALIBRATED["70B on H100x4"]
    without = time.batch_time_s(0, 50, 50 * 1100)
    whole = time.batch_time_s(1000, 50, 50 * 1100)
    assert mean_step_s(time, 50, CHAT) == pytest.approx(without + 0.25 * (whole - without))
    narrow = replace(CHAT, step_tokens=300.0)
    each = time.batch_time_s(250, 50, 50 * 1100)
    assert mean_step_s(time, 50, narrow) == pytest.approx(each), "in every step"


@given(st.floats(1, 512), st.floats(1, 512), st.floats(10, 8000), st.floats(10, 2000))
@examples(100)
def test_the_mean_step_grows_with_the_sequences(
    a: float, b: float, prompt: float, generated: float
) -> None:
    """So a bisection finds the capacity."""
    low, high = sorted((a, b))
    shape = Shape(prompt, generated, 2048.0)
    time = CALIBRATED["70B on H100x4"]
    assert mean_step_s(time, low, shape) <= mean_step_s(time, high, shape) + 1e-9


def test_prompts_wait_for_one_another() -> None:
    """One sequence waits hardly, more wait longer, and above the throughput of prefill for ever."""
    time = CALIBRATED["70B on H100x4"]
    waits = [prefill_wait_s(time, n, COMPLETION) for n in (0.1, 1.0, 4.0, 6.0)]
    assert waits == sorted(waits)
    assert waits[0] < 0.01
    assert prefill_wait_s(time, 115, COMPLETION) == math.inf
    assert prefill_wait_s(time, 8192, COMPLETION) == math.inf, "no token is left for prompts"


def test_prefill_wait_is_that_of_an_mg1_queue() -> None:
    """Half busy, exponential service times: a prompt waits as long as it takes."""
    flat = StepTime(0.1, 0.0, 0.0, 0.0, 0.0)
    shape = Shape(500.0, 10.0, 1005.0)
    # 5 sequences of 10 tokens in steps of 0.1 s are 5 requests/s; a prompt takes half a step, 0.05 s.
    busy = 5.0 * 0.05
    assert prefill_wait_s(flat, 5.0, shape) == pytest.approx(busy / (1 - busy) * 0.05)


@pytest.mark.parametrize(
    ("attainment", "want"), [(0.95, 0.76), (0.9, 0.98), (0.99, 0.54), (0.5, 2.0)]
)
def test_worked_examples_of_the_prefill_wait(attainment: float, want: float) -> None:
    """A ratio of the queue wait objective; up to it prompts are served promptly."""
    assert prefill_wait_ratio(attainment) == pytest.approx(want, abs=0.005)
    bounds = ControlSettings(attainment_ratio=attainment)
    time = CALIBRATED["70B on H100x4"]
    n = promptly_served(time, bounds, COMPLETION)
    assert prefill_wait_s(time, n, COMPLETION) <= want * 0.5 + 0.005
    assert prefill_wait_s(time, n + 0.25, COMPLETION) > want * 0.5 - 0.005


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("tokens", [256, 512])
def test_a_full_step_with_the_most_sequences_takes_the_objective(name: str, tokens: int) -> None:
    """Whether they fit in the step's tokens or not; none if the tokens alone take longer."""
    time, bounds = CALIBRATED[name], ControlSettings()
    n = most_sequences(time, bounds, CHAT, tokens)
    if time.batch_time_s(tokens, 0, 0) > bounds.batch_time_objective_s:
        assert n < 0
        return
    full_s = time.batch_time_s(max(tokens, n), 0, 0) + n * (time.b_s + time.c_s * CHAT.resident)
    assert full_s == pytest.approx(bounds.batch_time_objective_s, rel=0.01)


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("shape", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_a_higher_attainment_carries_less(name: str, shape: Shape) -> None:
    """attainmentPercent 50, 90, 95 and 99: prompts wait less, so never more requests/s."""
    time, carried, prompts = CALIBRATED[name], [], []
    for attainment in (0.5, 0.9, 0.95, 0.99):
        bounds = ControlSettings(attainment_ratio=attainment, batch_time_objective_s=0.1)
        capacity = capacity_of(time, bounds, shape, 400_000)
        prompt_capacity = promptly_served(time, bounds, shape)
        targets = Targets(None, capacity, int(capacity), prompt_capacity, time, shape)
        carried.append(targets.carried_per_s)
        prompts.append(prompt_capacity)
    assert carried == sorted(carried, reverse=True)
    assert carried[-1] > 0
    assert prompts == sorted(prompts, reverse=True)
    assert prompts[0] > prompts[-1] or prompts[-1] == bounds.max_sequences
