"""A finished comparison as a value, its texts, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fleetkeeper.common.budget import Budget
from fleetkeeper.simulate.arguments import Kind
from fleetkeeper.simulate.autoscalers import BUDGET
from fleetkeeper.simulate.comparison import Result, Setting, Spread
from fleetkeeper_steps.hardware import Hardware

SCHEMA: Final = 1
"""Version of the JSON: raised if a field changes its meaning or disappears."""
DIGITS: Final = 6
ENOUGH: Final = 500
"""The fewest requests of a run for a verdict: at 95%, the standard error is 1 point."""


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

    @property
    def verdict(self) -> str:
        """The result in one line: attainment, cost, and what to do if the objective is missed."""
        ours, *others = self.results
        requests = ours.figures["requests"].median
        if not requests >= ENOUGH:
            found = value_text(requests, "whole")
            return f"No verdict: a run needs {ENOUGH} requests, and this load has {found}. Play a longer load, or a higher rate."
        asked = ours.case.model.settings.attainment_ratio
        attained = value_text(ours.figures["slo_attainment"].median, "percent")
        reached = _reaches(ours, asked)
        text = (
            f"Fleetkeeper {'reaches' if reached else 'misses'} the objective: {attained} of requests "
            f"within the targets, {asked:.0%} asked. {_cost(ours, others, asked, reached=reached)}"
        )
        return text if reached else f"{text} {self._advice(asked)}".rstrip()

    def _advice(self, asked: float) -> str:
        """Return what to do about a missed objective, as far as the figures show it."""
        ours, *others = self.results
        limits = [each for each in ours.decided if each.subject == BUDGET]
        if limits:
            after = duration_text(limits[0].time_s)
            return f"{limits[0].message}, first after {after} (seed 1): raise --max-accelerators."
        figures, settings = ours.figures, ours.case.model.settings
        most, refused = settings.max_replicas, figures["refused"].median
        count = f"{refused:,.0f} requests were refused" if refused else ""
        fixed = [other.case.alternative for other in others if _reaches(other, asked)]
        is_enough = any(each.kind is Kind.STATIC and each.number <= most for each in fixed)
        if figures["most_replicas"].median >= most and not is_enough:
            why = f"{count}{', and ' * bool(count)}scaling.maxReplicas ({most}) was reached"
            return f"{why}: raise it, for example with --what-if scaling.maxReplicas={2 * most}."
        waits, steps = (
            figures["queue_wait_attainment"].median,
            figures["batch_time_attainment"].median,
        )
        if (refused or waits < asked) and settings.min_replicas < most:
            share = value_text(waits, "percent")
            return (
                f"{count or f'Only {share} of queue waits are within the objective'}, although scaling.maxReplicas ({most}) "
                f"{'is enough' if is_enough else 'was not reached'}: replicas were missing. "
                f"Keep more, for example with --what-if scaling.minReplicas={settings.min_replicas + 1}."
            )
        if waits >= asked and steps >= asked:
            ttft_s, tpot_s = self.setting.targets
            return (
                f"The objectives of the spec are attained, but ask for less than --ttft {ttft_s:g} "
                f"and --tpot {tpot_s:g}: tighten them."
            )
        if steps < asked:
            return f"Only {value_text(steps, 'percent')} of the steps are within objectives.batchTimeMilliseconds."
        return ""

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
            "verdict": self.verdict,
            "notes": list(self.notes),
            "alternatives": [_alternative(result) for result in self.results],
        }


class Total(NamedTuple):
    """An alternative over all services: sums of their medians."""

    name: str
    requests: float
    missed: float
    """Requests that were refused, lost, late or unfinished."""
    refused: float
    gpu_hours: float
    peak_gpus: int
    """The most accelerators of all replicas at a time, with seed 1."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The reports of services that were played together."""

    reports: tuple[Report, ...]
    budget: Budget

    @property
    def headline(self) -> str:
        """The services and their budgets in one line."""
        gpus, spaces = self.budget.total_gpus, self.budget.gpus_by_namespace
        bounds = [f"{gpus} GPUs"] * (gpus is not None)
        bounds += [f"{bound} in namespace {name}" for name, bound in spaces.items()]
        return f"{len(self.reports)} services under a budget of {', '.join(bounds)}"

    @property
    def totals(self) -> list[Total]:
        """The total of each alternative. A fixed fleet that not every service has is left out."""
        return [total_of(row) for row in zip(*[r.results for r in self.reports], strict=False)]

    def as_json(self) -> dict[str, Any]:
        """Return the totals, and the report of each service."""
        return {
            "schema": SCHEMA,
            "max_accelerators": self.budget.total_gpus,
            "max_accelerators_by_namespace": dict(self.budget.gpus_by_namespace),
            "totals": [total._asdict() for total in self.totals],
            "services": [report.as_json() for report in self.reports],
        }


def total_of(row: Sequence[Result]) -> Total:
    """Return the total of an alternative, of which each service has a result."""
    requests = [result.figures["requests"].median for result in row]
    attained = [result.figures["slo_attainment"].median for result in row]
    name, *others = dict.fromkeys(result.name for result in row)
    if others:
        name = "static:" + "+".join(f"{result.case.alternative.number:g}" for result in row)
    gpus = [
        sum(m.replicas * each.case.model.gpus for m, each in zip(moments, row, strict=True))
        for moments in zip(*(result.moments for result in row), strict=True)
    ]
    return Total(
        name,
        sum(requests),
        sum(count * (1 - share) for count, share in zip(requests, attained, strict=True)),
        sum(result.figures["refused"].median for result in row),
        sum(result.figures["gpu_hours"].median for result in row),
        max(gpus),
    )


def _reaches(result: Result, asked: float) -> bool:
    """Return whether the attainment, as the report shows it, is what is asked."""
    return round(result.figures["slo_attainment"].median, 3) >= asked


def _cost(ours: Result, others: Sequence[Result], asked: float, *, reached: bool) -> str:
    """Return the GPU-hours, and those of the cheapest alternative that reaches what is asked."""
    hours = ours.figures["gpu_hours"].median
    takes = f"It takes {value_text(hours, 'number')} GPU-hours"
    able = [other for other in others if _reaches(other, asked)]
    if not able:
        return f"{takes}{f'; no alternative reaches {asked:.0%}' * bool(others)}."
    cheapest = min(able, key=lambda other: other.figures["gpu_hours"].median)
    least = cheapest.figures["gpu_hours"].median
    text = value_text(least, "number")
    if reached:
        return (
            f"{takes}, {hours / least:.2f} times the {text} of {cheapest.name}, "
            f"the cheapest alternative that reaches {asked:.0%}."
        )
    return f"{takes}; {cheapest.name} reaches {asked:.0%} with {text}."


def _alternative(result: Result) -> dict[str, Any]:
    batch = {} if result.batch is None else {"batch": result.batch.as_json()}
    return {
        "name": result.name,
        "kind": str(result.case.alternative.kind),
        "what_if": result.case.what_if or None,
        "figures": figures_as_json(result.figures),
        "tiers": {tier: figures_as_json(figures) for tier, figures in result.tiers.items()},
        **batch,
        "decisions": [each.as_json() for each in result.decided],
        "time_line": [moment.as_json() for moment in result.moments],
    }


def figures_as_json(figures: Mapping[str, Spread]) -> dict[str, Any]:
    """Return median and range of each figure; null for what is unknown."""
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
