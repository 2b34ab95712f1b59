"""Compare the control loop of two commits on many loads, run by run.

    python benchmarks/evaluation/before_after.py play before.jsonl --traces DIRECTORY [--seeds 1,2,3] [--loads NAMES]
    python benchmarks/evaluation/before_after.py compare before.jsonl after.jsonl

Play once in a worktree of each commit. A run that the file has already is not played again. `compare` prints
medians for each load, and the mean and median difference over all pairs of runs. Loads are the scenes of the
evaluation and six more; names are separated by semicolons.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from play import Case, Job, scenario_of
from scenes import (
    CHAT,
    CODE,
    HOUR,
    Lengths,
    Scene,
    bursts,
    jitter,
    modulated,
    scenes,
    small,
    steps,
    wave,
)

from fleetkeeper.simulate.autoscalers import ControlLoop
from fleetkeeper.simulate.closed_loop import run

Row = dict[str, Any]


def loads(traces: Path | None) -> list[Scene]:
    """Return all loads."""
    long_prompts = Lengths(6000, 250, 0.5, 0.7)
    mixed = Lengths(1800, 1500, 1.2, 0.7)
    return [
        *scenes(traces),
        Scene("long prompts", 2, modulated(jitter(0.8, 0.15), long_prompts)),
        Scene("long outputs, mixed", 2, modulated(jitter(2.5, 0.15), mixed), max_replicas=16),
        small("chat, 8B", 2, modulated(jitter(14, 0.12), CHAT)),
        small("day, 8B", 8, modulated(wave(12, 0.6, 8 * HOUR), CHAT)),
        Scene("flash crowd", 1.5, modulated(steps(4, 30, 1500, 3600), CHAT)),
        Scene("bursts of code completion", 2, modulated(bursts(1.5, 8, 900, 150), CODE)),
    ]


def play(job: Job) -> Row:
    """Play one run."""
    scene = next(row for row in loads(job.traces) if row.name == job.scene)
    outcome, loop = run(scenario_of(scene, job))
    assert isinstance(loop, ControlLoop)
    reasons = [event.reason for _, event in loop.events]
    return {
        "load": job.scene,
        "seed": job.seed,
        "attainment": outcome.attainment,
        "gpu_hours": outcome.gpu_hours,
        "reversals": outcome.reversals(),
        "control": reasons.count("ControlBreakerOpen"),
        "tiers": reasons.count("LoadBreakerOpen"),
    }


def play_all(out: Path, jobs: Sequence[Job]) -> None:
    """Play the jobs that the file does not have, on all cores."""
    done = {(row["load"], row["seed"]) for row in read(out)} if out.exists() else set()
    due = [job for job in jobs if (job.scene, job.seed) not in done]
    with multiprocessing.Pool() as pool, out.open("a") as file:
        for number, row in enumerate(pool.imap_unordered(play, due), 1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"\r{number}/{len(due)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def read(path: Path) -> list[Row]:
    """Return the runs of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Return the table of the runs that both have."""
    old = {(row["load"], row["seed"]): row for row in before}
    pairs = [(old[key], row) for row in after if (key := (row["load"], row["seed"])) in old]
    heads = ["load", "seeds"]
    for head in (
        "SLO attainment",
        "GPU-hours",
        "reversals",
        "control breaker opened",
        "tiers opened",
    ):
        heads += [f"{head} before", "after"]
    text = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for load in dict.fromkeys(row["load"] for _, row in pairs):
        sides = list(zip(*[pair for pair in pairs if pair[1]["load"] == load], strict=True))
        cells = [load, str(len(sides[0]))]
        for name, form in (("attainment", ".1%"), ("gpu_hours", ".1f"), ("reversals", ".0f")):
            cells += [format(median(row[name] for row in side), form) for side in sides]
        for name in ("control", "tiers"):
            cells += [str(sum(row[name] for row in side)) for side in sides]
        text.append(f"| {' | '.join(cells)} |")
    gains = [100 * (new["attainment"] - was["attainment"]) for was, new in pairs]
    hours = sum(new["gpu_hours"] for _, new in pairs) / sum(was["gpu_hours"] for was, _ in pairs)
    text.append(
        f"\n{len(pairs)} pairs of runs: attainment {fmean(gains):+.2f} points (median "
        f"{median(gains):+.2f}), GPU-hours {hours:.3f} times"
    )
    return "\n".join(text)


def main() -> None:
    """Play, or compare what was played."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    player = commands.add_parser("play")
    player.add_argument("out", type=Path)
    player.add_argument("--traces", type=Path)
    player.add_argument("--seeds", default="1,2,3")
    player.add_argument("--loads", default="")
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    words = parser.parse_args()
    if words.command == "compare":
        print(compare(read(words.before), read(words.after)))
        return
    known = [scene.name for scene in loads(words.traces)]
    names = words.loads.split(";") if words.loads else known
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"{unknown[0]!r} is no load; the loads are {'; '.join(known)}")
    seeds = [int(seed) for seed in words.seeds.split(",")]
    jobs = [Job(name, seed, Case(), traces=words.traces) for seed in seeds for name in names]
    play_all(words.out, jobs)


if __name__ == "__main__":
    main()
