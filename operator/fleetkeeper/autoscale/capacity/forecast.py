"""Forecast of arrivals over a replica's cold start (Holt's linear method)."""

from __future__ import annotations

from dataclasses import dataclass

from fleetkeeper.autoscale.constants import (
    FORECAST_FACTOR,
    FORECAST_LEVEL,
    FORECAST_TREND,
    TICK_S,
)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Level (requests/s) and trend (requests/s per tick). `seen`: number of ticks used."""

    level: float = 0.0
    trend: float = 0.0
    seen: int = 0


def smoothed(forecast: Forecast, arrivals_per_s: float) -> Forecast:
    """Return the forecast after one more tick (Holt 1957, double exponential smoothing)."""
    if forecast.seen == 0:
        return Forecast(arrivals_per_s, 0.0, 1)
    level = FORECAST_LEVEL * arrivals_per_s + (1 - FORECAST_LEVEL) * (
        forecast.level + forecast.trend
    )
    trend = FORECAST_TREND * (level - forecast.level) + (1 - FORECAST_TREND) * forecast.trend
    return Forecast(level, trend, forecast.seen + 1)


def expected_per_s(forecast: Forecast, arrivals_per_s: float, horizon_s: float) -> float:
    """Return the arrivals to plan for: the larger of the current rate and the forecast, at most double.

    Example: 4/s, rising by 0.1/s a tick, a cold start of 60 s (12 ticks): 5.2/s; of 600 s: 8/s.
    """
    ahead = forecast.level + forecast.trend * horizon_s / TICK_S
    return max(arrivals_per_s, min(ahead, FORECAST_FACTOR * arrivals_per_s))
