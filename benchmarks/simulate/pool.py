"""Let 25 models share 4 GPUs for a day, in virtual time: what is answered, how long it takes, what it costs.

    .venv/bin/python benchmarks/simulate/pool.py [--seeds 3]

Writes a section of RESULTS.md. All models have the same size and start; requests are Poisson arrivals of a
day with a quiet night, in proportion to 1 / rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from results_page import markdown_table, measured_on, write_section  # noqa: E402

from fleetkeeper.api.types import InferenceServiceSpec  # noqa: E402
from fleetkeeper.common.budget import Budget  # noqa: E402
from fleetkeeper.simulate.comparison import Spread  # noqa: E402
from fleetkeeper.simulate.loads.arrivals import Mix, poisson  # noqa: E402
from fleetkeeper.simulate.pool.comparison import (  # noqa: E402
    Case,
    Kind,
    Result,
    Setting,
    compare,
    with_load,
    zipf_rates,
)
from fleetkeeper.simulate.pool.services import Member  # noqa: E402
from fleetkeeper.simulate.report.report import value_text  # noqa: E402
from fleetkeeper.simulate.service_model import model_of  # noqa: E402
from fleetkeeper_steps.hardware import known_hardware  # noqa: E402

PAGE = HERE / "RESULTS.md"
HEADING = "25 models on 4 GPUs"
MODELS, GPUS = 25, 4
AWAKE_S = 60


class Job(NamedTuple):
    """One alternative under one load."""

    name: str
    kind: Kind
    per_day: float
    idle_s: int = 900
    awake_s: int = AWAKE_S
    start_s: float = 75.0
    failed_ratio: float = 0.0


def jobs() -> list[Job]:
    """Return the rows of the tables."""
    rows = []
    for per_day in (250.0, 500.0, 1000.0):
        rows += [Job("always on", Kind.ALWAYS_ON, per_day), Job("KEDA-like", Kind.KEDA, per_day)]
        for idle_s in (900, 300, 60):
            rows.append(Job(f"afterIdleSeconds {idle_s}", Kind.FLEETKEEPER, per_day, idle_s))
    first = Job("afterIdleSeconds 60", Kind.FLEETKEEPER, 500.0, 60)
    rows += [
        first._replace(name="900 and minAwakeSeconds 300", idle_s=900, awake_s=300),
        first._replace(name="300 and minAwakeSeconds 300", idle_s=300, awake_s=300),
        first._replace(name="60 and minAwakeSeconds 300", awake_s=300),
        first._replace(name="60 and starts of 30 s", start_s=30.0),
        Job("KEDA-like, starts of 30 s", Kind.KEDA, 500.0, start_s=30.0),
        first._replace(name="60 and 5% of the starts fail", failed_ratio=0.05),
    ]
    return rows


MORE: Final = 6
"""The last rows of `jobs`, which vary one parameter."""


def play(job: Job, seeds: int) -> Result:
    """Play one job with every seed."""
    sleep = {"afterIdleSeconds": job.idle_s, "minAwakeSeconds": job.awake_s}
    spec = InferenceServiceSpec.model_validate(
        {"model": {"source": "pvc://models/any"}, "access": "Gateway", "scaling": {"sleep": sleep}}
    )
    model = model_of(spec, 1, replace(known_hardware()["h100-8b"], cold_start_s=job.start_s), 1)
    names = [("default", f"model-{number:02}") for number in range(1, MODELS + 1)]
    members = [Member(name, spec, model, poisson(lambda _: 0.0, 0.0, Mix())) for name in names]
    case = Case(job.kind, with_load(members, zipf_rates(MODELS, 1.0, job.per_day), Mix()))
    setting = Setting(Budget(GPUS), seeds=seeds, failed_ratio=job.failed_ratio)
    (result,) = compare([case], setting)
    # A load is a function of its own, which no other process can read.
    return replace(result, case=Case(job.kind, ()))


def table(rows: Sequence[tuple[Job, Result]]) -> str:
    """Return a table of medians, with the range over the seeds of what was given up."""
    headings = [
        "", "at once", "after a hold", "after a retry", "given up", "wait P50 (P95)",
        "no turn for", "sleeps", "waits for GPUs", "GPU-hours", "most GPUs",
    ]  # fmt: skip
    lines = []
    for job, result in rows:
        figures = result.figures
        percents = [
            _text(figures[name], "percent") for name in ("at_once", "after_hold", "after_retry")
        ]
        up = figures["given_up"]
        waits = [_text(figures[name], "seconds") for name in ("wait_p50_s", "wait_p95_s")]
        lines.append(
            [
                job.name,
                *percents,
                f"{_text(up, 'percent')} ({100 * up.least:.1f} to {100 * up.most:.1f})",
                f"{waits[0]} ({waits[1]})" if waits[0] != "-" else "-",
                _text(figures["longest_without_turn_s"], "seconds"),
                _text(figures["sleeps"], "whole"),
                _text(figures["budget_wait"], "percent"),
                f"{figures['gpu_hours'].median:.0f}",
                _text(figures["peak_gpus"], "whole"),
            ]
        )
    return markdown_table(headings, lines)


def _text(spread: Spread, form: str) -> str:
    return value_text(spread.median, form)


def section(rows: Sequence[tuple[Job, Result]], seeds: int) -> str:
    """Return the text of the section."""
    tables = []
    for per_day in sorted({job.per_day for job, _ in rows}):
        of_load = [row for row in rows[:-MORE] if row[0].per_day == per_day]
        tables.append(f"**{per_day:.0f} requests a day**\n\n{table(of_load)}")
    return f"""
    .venv/bin/python benchmarks/simulate/pool.py

The rows `afterIdleSeconds` are the operator's own decisions about sleep and the GPU budget, with `minAwakeSeconds` {AWAKE_S}, the order of a replica as measured ([a median of 0.1 s](../simulated/RESULTS.md#services-that-sleep)) and a hold of 55 s. "KEDA-like" scales between 0 and 1 with a polling interval of 30 s, a cooldown of 300 s and no hold, and its pods wait for GPUs in order. "Always on" has a GPU for each model. A client repeats a refused request for 300 s: at `Retry-After` if the answer has one, otherwise after 0.5, 1, 2, 4 and then 8 s.

Models are of the size of `h100-8b`, with 1,000 prompt and 200 answer tokens on average. A start takes 75 s as a median, one in ten three times as long. Medians of {seeds} seeds; in brackets after "given up" the range. *No turn for*: the longest time for which clients of one model waited and none got an answer. *Waits for GPUs*: share of the time of all wakes before the budget allowed the replica.

{chr(10).join(f"{text}{chr(10)}" for text in tables)}
**Other parameters**, at 500 requests a day

{table(rows[-MORE:])}

Not in the model: the seconds until a pod that ends frees its GPU, nodes that must start, downloads, and users who send several requests in a row, which favor a longer `afterIdleSeconds`.

{measured_on()}
"""


def main() -> None:
    """Play all rows on all cores, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    words = parser.parse_args()
    rows = jobs()
    with multiprocessing.Pool() as pool:
        results = pool.map(partial(play, seeds=words.seeds), rows, chunksize=1)
    text = section(list(zip(rows, results, strict=True)), words.seeds)
    write_section(HEADING, text, PAGE, "# Simulator\n")
    print(text)


if __name__ == "__main__":
    main()
