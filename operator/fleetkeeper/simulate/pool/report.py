"""The report of a pool: its texts, its tables, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from fleetkeeper.simulate.pool.comparison import Result, Setting
from fleetkeeper.simulate.pool.services import COOLDOWN_S
from fleetkeeper.simulate.pool.sleepers import HOLD_S
from fleetkeeper.simulate.pool.world import PATIENCE_S
from fleetkeeper.simulate.report.report import SCHEMA, duration_text, figures_as_json, plural
from fleetkeeper.simulate.report.tables import Column, figures_table
from fleetkeeper.simulate.report.terminal import drawn_table

REQUESTS: Final[Sequence[Column]] = (
    Column("AT ONCE", "at_once", "percent", "requests that a replica took at once"),
    Column("AFTER HOLD", "after_hold", "percent", "answered at the first try, which waited"),
    Column("AFTER RETRY", "after_retry", "percent", "answered at a later try"),
    Column("GIVEN UP", "given_up", "percent", "requests whose clients lost patience"),
    Column("WAIT P50", "wait_p50_s", "seconds", "of the answered requests that waited, median"),
    Column("WAIT P95", "wait_p95_s", "seconds", "the same, 95th percentile"),
    Column(
        "NO TURN FOR", "longest_without_turn_s", "seconds",
        "longest time for which clients of a service waited and none got an answer",
    ),
)  # fmt: skip
COST: Final[Sequence[Column]] = (
    Column("GPU HOURS", "gpu_hours", "number", "from the creation of replicas to their end"),
    Column("MOST GPUS", "peak_gpus", "whole", "the most accelerators in use at once"),
    Column("SLEEPS", "sleeps", "whole", "times that a service released its replicas"),
    Column("WAKES", "wakes", "whole", "times that requests woke a service"),
    Column("FAILED STARTS", "failed_starts", "whole", "starts without a ready replica"),
    Column("BUDGET WAIT", "budget_wait", "percent", "share of the time of wakes for lack of GPUs"),
)


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A finished comparison for display."""

    load: str
    """Description of the load."""
    setting: Setting
    results: tuple[Result, ...]

    @property
    def headline(self) -> str:
        """The inputs in one line."""
        setting = self.setting
        services = plural(len(self.results[0].services), "service")
        return (
            f"{services} that sleep, on {plural(setting.budget.total_gpus or 0, 'GPU')}; {self.load}; "
            f"{duration_text(setting.seconds)}, {plural(setting.seeds, 'seed')}"
        )

    @property
    def rules(self) -> str:
        """What the alternatives mean."""
        return (
            f"A client tries for {PATIENCE_S:.0f} s. fleetkeeper: a hold of {HOLD_S:.0f} s, then Retry-After. "
            f"keda: a cooldown of {COOLDOWN_S:.0f} s, no hold. always-on: without the limit of GPUs."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report with numbers in seconds and ratios; null for what is unknown."""
        return {
            "schema": SCHEMA,
            "max_accelerators": self.setting.budget.total_gpus,
            "load": self.load,
            "seconds": self.setting.seconds,
            "seeds": self.setting.seeds,
            "alternatives": [
                {
                    "name": result.name,
                    "figures": figures_as_json(result.figures),
                    "services": {
                        name: figures_as_json(figures) for name, figures in result.services.items()
                    },
                }
                for result in self.results
            ],
        }

    def as_tables(self) -> Group:
        """Return the report for a terminal."""
        parts: list[RenderableType] = [Text(self.headline, style="bold"), Text(self.rules)]
        if self.setting.seeds > 1:
            parts.append(Text("Medians over the seeds, with min..max.", style="dim"))
        for caption, columns in (("Requests", REQUESTS), ("Cost", COST)):
            table = figures_table(caption, columns, self.results)
            parts += [Text(), drawn_table(table)]
        return Group(*parts)
