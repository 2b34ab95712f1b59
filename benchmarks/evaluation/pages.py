"""Write the page docs/evaluation.md from the figures of the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from play import ALTERNATIVES, RULES, Case, Figures, Job, key_of
from scenes import Scene

NOTES = Path(__file__).parent / "notes.md"
DIAL = (0.90, 0.95, 0.99)
ENOUGH = 0.95


def page(
    scenes: Sequence[Scene],
    steady: Mapping[str, bool],
    seeds: Sequence[int],
    results: Mapping[str, Figures],
) -> str:
    """Return the page. Runs that are not there are left out of the medians."""
    tables = _Tables(seeds, results)
    before, after = NOTES.read_text().split("<!-- tables -->\n")
    names = [scene.name for scene in scenes]
    parts = [
        before,
        "![SLO attainment against GPU-hours, one panel for each scene](img/evaluation.png)\n",
        "## Steady loads\n",
        tables.compared([name for name in names if steady[name]]),
        "\n## Steps, ramps and bursts\n",
        tables.compared([name for name in names if not steady[name]]),
        "\n## attainmentPercent\n",
        tables.dial(names),
        "\n## Each rule off\n",
        tables.ablation(names),
        after,
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


class _Tables:
    def __init__(self, seeds: Sequence[int], results: Mapping[str, Figures]) -> None:
        self._seeds = seeds
        self._results = results

    def _runs(self, scene: str, case: Case | None = None, **changes: object) -> list[Figures]:
        keys = [key_of(Job(scene, seed, case or Case(), **changes)) for seed in self._seeds]  # type: ignore[arg-type]
        return [self._results[key] for key in keys if key in self._results]

    def _best(self, scene: str) -> tuple[Case, list[Figures]] | None:
        """Return the cheapest alternative that reaches 95%, else the best one."""
        found = [(case, runs) for case in ALTERNATIVES if (runs := self._runs(scene, case))]
        good = [row for row in found if _median(row[1], "attainment") >= ENOUGH]
        if good:
            return min(good, key=lambda row: _median(row[1], "gpu_hours"))
        return max(found, key=lambda row: _median(row[1], "attainment"), default=None)

    def compared(self, names: Sequence[str]) -> str:
        """Return the table of Fleetkeeper and the cheapest alternative by scene."""
        lines = [
            "| scene | Fleetkeeper: SLO attainment | GPU-hours | changes, reversals | cheapest alternative that reaches 95% | its attainment | its GPU-hours | ratio |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name in names:
            runs, best = self._runs(name), self._best(name)
            if not runs or best is None:
                continue
            case, others = best
            reaches = _median(others, "attainment") >= ENOUGH
            ratio = _median(runs, "gpu_hours") / _median(others, "gpu_hours")
            lines.append(
                f"| {name} | {_span(runs, 'attainment', 100, '%')} | {_span(runs, 'gpu_hours')} "
                f"| {_median(runs, 'changes'):.0f}, {_median(runs, 'reversals'):.0f} "
                f"| {'' if reaches else 'none; best: '}{case} | {_span(others, 'attainment', 100, '%')} "
                f"| {_span(others, 'gpu_hours')} | {ratio:.2f} |"
            )
        return "\n".join(lines)

    def dial(self, names: Sequence[str]) -> str:
        """Return the table of attainmentPercent."""
        lines = [
            "| scene | attainmentPercent | queue wait within | batch time within | SLO attainment | GPU-hours |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name in names:
            rows = [(value, self._runs(name, attainment=value)) for value in DIAL]
            if not all(runs for _, runs in rows):
                continue
            for value, runs in rows:
                lines.append(
                    f"| {name} | {value:.0%} | {_span(runs, 'wait', 100, '%')} | {_span(runs, 'batch', 100, '%')} "
                    f"| {_median(runs, 'attainment'):.1%} | {_span(runs, 'gpu_hours')} |"
                )
        return "\n".join(lines)

    def ablation(self, names: Sequence[str]) -> str:
        """Return the table of each rule off: attainment in percent, and GPU-hours."""
        shown = [name for name in names if all(self._runs(name, without=rule) for rule in RULES)]
        lines = ["| off | " + " | ".join(shown) + " |", "| --- |" + " --- |" * len(shown)]
        for rule in ("", *RULES):
            cells = []
            for name in shown:
                runs = self._runs(name, without=rule)[:3]
                cells.append(f"{_median(runs, 'attainment'):.1%}, {_median(runs, 'gpu_hours'):.1f}")
            lines.append(f"| {rule or 'nothing'} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


def _median(runs: Sequence[Figures], name: str) -> float:
    return float(median([getattr(run, name) for run in runs]))


def _span(runs: Sequence[Figures], name: str, factor: float = 1.0, unit: str = "") -> str:
    """Return the median, and the least and the most in brackets."""
    values = sorted(factor * getattr(run, name) for run in runs)
    middle = float(median(values))
    return f"{middle:.1f}{unit} ({values[0]:.1f} to {values[-1]:.1f})"
