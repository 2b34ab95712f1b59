"""Evaluate the control loop on the scenes, and write docs/evaluation.md.

    python benchmarks/evaluation/evaluate.py [--traces DIRECTORY] [--seeds 5] [--part PART]

Each scene is played by Fleetkeeper with the shipped defaults and by twenty autoscalers on concurrency
or waiting requests. All alternatives are played with the first seed; those within two points of 95%
attainment and 1.5 times the cheapest of them with all seeds. Results are kept in results.json, so a
part can be repeated alone. `--keep` plays only what is not there yet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from curve import draw
from pages import page
from play import ALTERNATIVES, RULES, Case, Figures, Job, key_of, play
from scenes import rates, scenes

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE.parents[1] / "docs" / "evaluation.md"
FIGURE = PAGE.parent / "img" / "evaluation.png"
DIAL = (0.90, 0.95, 0.99)
ABLATED = (
    "chat",
    "long outputs",
    "enterprise, 70B",
    "code completion",
    "step x3",
    "step x3, 20% batch",
    "bursts of 3 min",
)
DIALLED = ("chat, morning", "enterprise, 70B", "code completion", "bursts of 3 min")
ENOUGH = 0.95
PARTS = ("fleetkeeper", "alternatives", "dial", "ablation", "contenders")

Results = dict[str, Figures]


def _played(job: Job) -> tuple[str, Figures]:
    return key_of(job), play(job)


def play_all(jobs: Iterable[Job], results: Results) -> None:
    """Play the jobs that have no result yet, on all cores, and keep the results."""
    due = [job for job in jobs if key_of(job) not in results]
    with multiprocessing.Pool() as pool:
        for number, (key, figures) in enumerate(pool.imap_unordered(_played, due), 1):
            results[key] = figures
            print(f"\r{number}/{len(due)} runs", end="", file=sys.stderr, flush=True)
            if number % 20 == 0:
                save(results)
    print(file=sys.stderr)
    save(results)


def save(results: Results) -> None:
    """Write the results."""
    rows = {key: [round(value, 5) for value in row] for key, row in sorted(results.items())}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n")


def load() -> Results:
    """Return the results that are there."""
    if not RESULTS.exists():
        return {}
    rows = json.loads(RESULTS.read_text())
    return {key: Figures(*row) for key, row in rows.items()}


def contenders(scene: str, results: Results, traces: Path | None) -> list[Case]:
    """Return the alternatives that are worth all seeds, by their first run."""
    first = {case: results[key_of(Job(scene, 1, case, traces=traces))] for case in ALTERNATIVES}
    good = [row for row in first.values() if row.attainment >= ENOUGH - 0.02]
    least = min((row.gpu_hours for row in good), default=0.0)
    return [
        case
        for case, row in first.items()
        if row.attainment >= ENOUGH - 0.02 and row.gpu_hours <= 1.5 * least
    ]


def jobs_of(
    part: str, names: Sequence[str], seeds: Sequence[int], results: Results, traces: Path | None
) -> list[Job]:
    """Return the jobs of a part."""
    if part == "fleetkeeper":
        return [Job(name, seed, traces=traces) for name in names for seed in seeds]
    if part == "alternatives":
        return [Job(name, 1, case, traces=traces) for name in names for case in ALTERNATIVES]
    if part == "contenders":
        return [
            Job(name, seed, case, traces=traces)
            for name in names
            for case in contenders(name, results, traces)
            for seed in seeds
        ]
    if part == "dial":
        return [
            Job(name, seed, attainment=value, traces=traces)
            for name in DIALLED
            for value in DIAL
            for seed in seeds
        ]
    return [
        Job(name, seed, without=rule, traces=traces)
        for name in ABLATED
        for rule in RULES
        for seed in seeds[:3]
    ]


def main() -> None:
    """Play the parts, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--render", action="store_true", help="write the page from results.json")
    words = parser.parse_args()
    seeds = range(1, words.seeds + 1)
    results = load() if words.keep or words.render or words.part != "all" else {}
    chosen = scenes(words.traces)
    names = [scene.name for scene in chosen]
    for part in () if words.render else PARTS if words.part == "all" else (words.part,):
        print(part, file=sys.stderr)
        jobs = jobs_of(part, names, seeds, results, words.traces)
        if not words.keep:
            for job in jobs:
                results.pop(key_of(job), None)
        play_all(jobs, results)
    steady = {
        scene.name: _peak_ratio(rates(scene.load, scene.hours * 3600, 1)) < 1.5 for scene in chosen
    }
    PAGE.write_text(page(chosen, steady, list(seeds), results))
    draw(names, list(seeds), results, FIGURE)
    print(f"wrote {PAGE.name} and {FIGURE.name}")


def _peak_ratio(values: Sequence[float]) -> float:
    """Return the 95th percentile over the mean."""
    rows = sorted(values)
    return rows[min(len(rows) - 1, int(0.95 * len(rows)))] / (sum(rows) / len(rows))


if __name__ == "__main__":
    main()
