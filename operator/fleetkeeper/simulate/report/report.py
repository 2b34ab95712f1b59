"""A finished comparison as a value, its texts, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fleetkeeper.simulate.comparison import Result, Setting, Spread
from fleetkeeper_steps.hardware import Hardware

SCHEMA: Final = 1
"""Version of the JSON: raised if a field changes its meaning or disappears."""
DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison for display."""

    service: str
    """Namespace and name."""
    hardware: Hardware
    load: str
    """Description of the load."""
    setting: Setting
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def objectives_s(self) -> tuple[float, float]:
        """The objectives of queue wait and batch time, in seconds."""
        settings = self.results[0].case.model.settings
        return settings.queue_wait_objective_s, settings.batch_time_objective_s

    @property
    def headline(self) -> str:
        """The inputs in one line."""
        return (
            f"{self.service}: {self.hardware.model} on {self.hardware.name}; {self.load}; "
            f"{duration_text(self.setting.seconds)}, {plural(self.setting.seeds, 'seed')}"
        )

    @property
    def target_text(self) -> str:
        """The definition of attained."""
        ttft_s, tpot_s = self.setting.targets
        wait_s, step_s = self.objectives_s
        return (
            f"SLO attainment: requests with TTFT <= {seconds_text(ttft_s)} and TPOT <= {seconds_text(tpot_s)}, "
            f"of all that arrived. Objectives: queue wait {seconds_text(wait_s)}, batch time {seconds_text(step_s)}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report with numbers in seconds and ratios; null for what is unknown."""
        ttft_s, tpot_s = self.setting.targets
        wait_s, step_s = self.objectives_s
        return {
            "schema": SCHEMA,
            "service": self.service,
            "hardware": {
                "name": self.hardware.name,
                "model": self.hardware.model,
                "source": self.hardware.source,
                "gpus_per_replica": self.results[0].case.model.gpus,
            },
            "load": self.load,
            "seconds": self.setting.seconds,
            "seeds": self.setting.seeds,
            "targets": {"ttft_s": ttft_s, "tpot_s": tpot_s},
            "objectives": {"queue_wait_s": wait_s, "batch_time_s": step_s},
            "notes": list(self.notes),
            "alternatives": [_alternative(result) for result in self.results],
        }


def _alternative(result: Result) -> dict[str, Any]:
    batch = {} if result.batch is None else {"batch": result.batch.as_json()}
    return {
        "name": result.name,
        "kind": str(result.case.alternative.kind),
        "what_if": result.case.what_if or None,
        "figures": _figures(result.figures),
        "tiers": {tier: _figures(figures) for tier, figures in result.tiers.items()},
        **batch,
        "time_line": [moment.as_json() for moment in result.moments],
    }


def _figures(figures: Mapping[str, Spread]) -> dict[str, Any]:
    return {
        name: {
            "median": _number(spread.median),
            "min": _number(spread.least),
            "max": _number(spread.most),
        }
        for name, spread in figures.items()
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, DIGITS)


# -- texts --------------------------------------------------------------------------------------------


def value_text(value: float, form: str) -> str:
    """Return a figure in the form of its column; - if it is unknown."""
    if math.isnan(value):
        return "-"
    if form == "percent":
        return f"{100 * value:.1f}%"
    if form == "seconds":
        return seconds_text(value)
    if form == "whole":
        return f"{value:,.0f}"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def spread_text(spread: Spread, form: str) -> str:
    """Return `least..most`, the unit once; an empty string if both look like the median."""
    median, least, most = (value_text(value, form) for value in spread)
    if median == least == most:
        return ""
    (low, space, unit), (_, _, other) = least.partition(" "), most.partition(" ")
    return f"{low if space and unit == other else least}..{most}"


def seconds_text(value: float) -> str:
    """Return a time with three digits: 12.3 ms, 1.23 s, 2.5 h."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    if value >= 1:
        return f"{value:.0f} s" if value >= 100 else f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value else "0 s"


def duration_text(seconds: float) -> str:
    """Return the length of a run."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.0f} s"


def plural(count: int, word: str) -> str:
    """Return `1 seed` or `5 seeds`."""
    return f"{count} {word}{'s' * (count != 1)}"
