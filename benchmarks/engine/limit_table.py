"""Throughput, queue wait and batch time by the sequence limit, changed in one running engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from clients import clients_at

from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from tests.support.engine.inside_engine import SETTINGS, InsideEngine, client

TOKENS = 32
WINDOW_S = 2.5
STEPS = 40
PATIENCE_S = 900.0
"""Only a hang lasts this long; a busy machine must not end a measurement."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measured limits, and the engine's settings.

    There are more clients than the highest limit, so that a free place is taken at once.
    """

    title: str
    sequences: tuple[int, ...]
    clients: int
    settings: VllmSettings
    rounds: int


NARROW = Sweep(
    "Sequence limit, changed while the engine runs", (1, 4, 8, 16, 32, 64), 80, SETTINGS, 5
)
WIDE = Sweep(
    "Sequence limit up to 128, changed while the engine runs",
    (1, 2, 4, 8, 16, 32, 64, 128),
    160,
    replace(SETTINGS, max_sequences=128, standard_queue_limit=256),
    3,
)


async def measure(
    directory: Path,
    locked: Callable[[], contextlib.AbstractContextManager[None]],
    sweep: Sweep,
) -> dict[str, Any]:
    """Measure one running engine; only the limit changes between windows, never the process."""
    rounds: dict[int, list[dict[str, float]]] = {n: [] for n in sweep.sequences}
    engine = InsideEngine(directory, sweep.settings)
    try:
        async with client() as session:
            for number in range(sweep.rounds):
                with locked():
                    for sequences, figures in (await one_round(engine, session, sweep)).items():
                        rounds[sequences].append(figures)
                print("round", number + 1, flush=True)
    finally:
        engine.stop()
    return {
        str(sequences): {key: median(r[key] for r in found) for key in found[0]}
        for sequences, found in rounds.items()
    }


async def one_round(
    engine: InsideEngine, session: aiohttp.ClientSession, sweep: Sweep
) -> dict[int, dict[str, float]]:
    """Measure every limit once, with all clients active."""
    found = {}
    async with clients_at(engine, session, sweep.clients, (TOKENS, TOKENS)):
        for sequences in reversed(sweep.sequences):
            engine.set_block(sequences=sequences)
            scheduled = sum(engine.scheduler().queue_wait_buckets)
            # By then every client has waited once under this limit.
            due = scheduled + sweep.clients
            await engine.until(
                lambda due=due: sum(engine.scheduler().queue_wait_buckets) >= due,  # type: ignore[misc]
                PATIENCE_S,
            )
            found[sequences] = await window(engine)
    engine.free_all()
    return found


async def window(engine: InsideEngine) -> dict[str, float]:
    """Return the engine's own figures over a few seconds."""
    before, started = engine.scheduler(), time.perf_counter()
    await asyncio.sleep(WINDOW_S)
    # A machine that is busy otherwise may take no step for seconds.
    least = before.worked_steps + STEPS
    await engine.until(lambda: engine.scheduler().worked_steps >= least, PATIENCE_S)
    waits = sum(before.queue_wait_buckets)
    await engine.until(lambda: sum(engine.scheduler().queue_wait_buckets) > waits, PATIENCE_S)
    after, took = engine.scheduler(), time.perf_counter() - started
    steps = after.worked_steps - before.worked_steps
    waits = sum(after.queue_wait_buckets) - sum(before.queue_wait_buckets)
    return {
        "tokens_per_s": (after.generation_tokens - before.generation_tokens) / took,
        "batch_time_s": (after.batch_time_sum - before.batch_time_sum) / steps,
        "batch_sequences": (after.batch_sequences_sum - before.batch_sequences_sum) / steps,
        "queue_wait_s": (sum(after.queue_wait_sum) - sum(before.queue_wait_sum)) / waits,
    }


def render(part: dict[str, Any], sweep: Sweep) -> str:
    """Return the section of the report."""
    figures = part["figures"]
    lines = [
        f"## {sweep.title}\n",
        f"{sweep.clients} clients, {TOKENS} tokens per request; medians of {sweep.rounds} rounds{share_of(part)}.\n",
        "| limit | sequences per step | tok/s | queue wait | batch time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for sequences, f in sorted(figures.items(), key=lambda item: int(item[0])):
        lines.append(
            f"| {sequences} | {f['batch_sequences']:.1f} | {f['tokens_per_s']:.0f} "
            f"| {f['queue_wait_s']:.3f} s | {1e3 * f['batch_time_s']:.1f} ms |"
        )
    return "\n".join(lines) + f"\n\n{gains(figures, sweep)}\n"


def share_of(part: dict[str, Any]) -> str:
    """Return the share of the machine that the benchmark was guaranteed, if any."""
    cores = part.get("cores")
    return f", {cores:g} cores guaranteed to the engine and the clients" if cores else ""


def gains(figures: dict[str, dict[str, float]], sweep: Sweep) -> str:
    """Return the throughput at the highest limits, relative to the lowest."""
    lowest = sweep.sequences[0]
    base = figures[str(lowest)]["tokens_per_s"]
    named = sweep.sequences[-1:] if sweep is NARROW else sweep.sequences[-3:]
    return " ".join(
        f"Throughput at {limit} is {figures[str(limit)]['tokens_per_s'] / base:.1f} times that at {lowest}."
        for limit in named
    )
