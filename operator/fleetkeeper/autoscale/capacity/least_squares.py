"""Recursive least squares from sums of products, updated only in excited directions.

A batch of n steps arrives as sums `Sxx` and `Sxy`. The Cholesky factor R (R'R = Sxx) turns it into at
most k pseudo-observations, its rows, which contain all information of the n steps. Each row is one step
of recursive least squares. Forgetting acts only along that row's direction (Cao and Schwartz 2000,
directional forgetting), so that directions without excitation are not forgotten and the covariance does
not wind up. Sizes are 2 or 3, for which plain lists are fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetkeeper.autoscale.constants import (
    COVARIANCE_MAX,
    COVARIANCE_MIN,
    EXCITED_RATIO,
    FORGETTING,
    GATE_REFUSALS,
    INNOVATION_GATE,
)

Vector = tuple[float, ...]
Matrix = tuple[Vector, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients, their covariance, noise variance of one step, steps seen, rejections in a row."""

    coefficients: Vector
    covariance: Matrix
    noise: float = 1.0
    steps: float = 0.0
    refused: int = 0

    def predict(self, features: Vector) -> float:
        """Return the fitted value at `features`."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def variance(self, features: Vector) -> float:
        """Return the variance of the fitted value, from the covariance of the coefficients."""
        return max(0.0, _quadratic(self.covariance, features))


def unknown_fit(size: int) -> Fit:
    """Return an uninformed fit: coefficients 0, covariance at its upper bound."""
    return Fit((0.0,) * size, _diagonal(size, COVARIANCE_MAX), noise=0.0)


def _diagonal(size: int, value: float) -> Matrix:
    return tuple(tuple(value if i == j else 0.0 for j in range(size)) for i in range(size))


def _quadratic(matrix: Matrix, x: Sequence[float]) -> float:
    return sum(
        a * sum(m * b for m, b in zip(row, x, strict=True))
        for row, a in zip(matrix, x, strict=True)
    )


def pseudo_observations(sxx: Matrix, sxy: Vector) -> list[tuple[Vector, float]]:
    """Return rows (features, value) equivalent to the sums, without rows that were hardly excited.

    Example: 100 equal steps at 10 sequences give one row: the slope was not excited.
    """
    size = len(sxy)
    scale = [math.sqrt(sxx[i][i]) if sxx[i][i] > 0 else 0.0 for i in range(size)]
    root = [[0.0] * size for _ in range(size)]
    values = [0.0] * size
    for i in range(size):
        pivot = sxx[i][i] - sum(root[k][i] ** 2 for k in range(i))
        if scale[i] == 0.0 or pivot <= EXCITED_RATIO * scale[i] ** 2:
            continue
        root[i][i] = math.sqrt(pivot)
        for j in range(i + 1, size):
            root[i][j] = (sxx[i][j] - sum(root[k][i] * root[k][j] for k in range(i))) / root[i][i]
        values[i] = (sxy[i] - sum(root[k][i] * values[k] for k in range(i))) / root[i][i]
    return [(tuple(root[i]), values[i]) for i in range(size) if root[i][i] > 0.0]


def updated(fit: Fit, n: float, sxx: Matrix, sxy: Vector, syy: float) -> tuple[Fit, float]:
    """Return the fit after a batch of `n` steps, and its relative prediction error of their mean.

    A batch with an error above the innovation gate is rejected. At the sixth rejection in a row the
    covariance is reset and the batch is accepted.
    """
    mean_x = tuple(value / n for value in sxx[0])
    mean_y = sxy[0] / n
    missed = mean_y - fit.predict(mean_x)
    relative = abs(missed) / mean_y if mean_y > 0 else 0.0
    noise = _noise(fit, mean_y, sxx, sxy, syy)
    if fit.steps > 0:
        allowed = INNOVATION_GATE * (noise / min(n, 10.0) + fit.variance(mean_x))
        if missed * missed > allowed:
            if fit.refused + 1 < GATE_REFUSALS:
                return replace(fit, refused=fit.refused + 1), relative
            fit = replace(fit, covariance=_diagonal(len(sxy), COVARIANCE_MAX))
    coefficients, covariance = fit.coefficients, fit.covariance
    for row, value in pseudo_observations(sxx, sxy):
        coefficients, covariance = _observed(coefficients, covariance, row, value, noise)
    coefficients = tuple([max(0.0, c) for c in coefficients])
    return Fit(coefficients, _bounded(covariance), noise, fit.steps + n), relative


def _noise(fit: Fit, mean_y: float, sxx: Matrix, sxy: Vector, syy: float) -> float:
    """Return the variance of one step around the fit: measured, smoothed, at least (2% of the mean)^2."""
    floor = (0.02 * mean_y) ** 2 + 1e-6
    if fit.steps <= 0:
        return max(floor, (0.1 * mean_y) ** 2)
    crossed = sum(c * v for c, v in zip(fit.coefficients, sxy, strict=True))
    residual = max(0.0, (syy - 2 * crossed + _quadratic(sxx, fit.coefficients)) / sxx[0][0])
    return max(floor, fit.noise + 0.1 * (min(residual, 4 * fit.noise) - fit.noise))


def _observed(
    coefficients: Vector, p: Matrix, x: Vector, y: float, noise: float
) -> tuple[Vector, Matrix]:
    """Return coefficients and covariance after one step, with forgetting along `x` only."""
    px = [sum([a * b for a, b in zip(row, x, strict=True)]) for row in p]
    spread = sum([a * b for a, b in zip(x, px, strict=True)])
    if spread <= 0.0:
        return coefficients, p
    gain = 1.0 / (noise + spread)
    error = y - sum([c * a for c, a in zip(coefficients, x, strict=True)])
    shrink = gain - (1.0 / FORGETTING - 1.0) * (noise * gain) / spread
    return (
        tuple([c + g * gain * error for c, g in zip(coefficients, px, strict=True)]),
        tuple(
            [
                tuple([v - shrink * a * b for v, b in zip(row, px, strict=True)])
                for row, a in zip(p, px, strict=True)
            ]
        ),
    )


def _bounded(p: Matrix) -> Matrix:
    """Return the covariance scaled down to its upper bound, with its correlations, and raised to its lower."""
    factor = [
        math.sqrt(COVARIANCE_MAX / row[i]) if row[i] > COVARIANCE_MAX else 1.0
        for i, row in enumerate(p)
    ]
    return tuple(
        tuple(
            max(value * factor[i] * factor[j], COVARIANCE_MIN)
            if i == j
            else value * factor[i] * factor[j]
            for j, value in enumerate(row)
        )
        for i, row in enumerate(p)
    )
