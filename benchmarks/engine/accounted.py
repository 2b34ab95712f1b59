"""The CPU time of our code in a running engine: measured at its entries, in place.

On a shared machine two engines differ by more than our code costs. A thread's CPU clock does not
count other processes. Measured in place, code runs with the cold caches that it has between a
model's steps; a loop around the code alone would hide them.
"""

from __future__ import annotations

import runpy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_words import shared_words

INSIDE = Path(__file__).resolve().parent / "accounted"
ENTRIES: tuple[str, ...] = runpy.run_path(str(INSIDE / "sitecustomize.py"))["ENTRIES"]
BETWEEN_STEPS = ("before_schedule", "after_schedule", "after_update")
"""Entries that run while the workers wait for the scheduler's thread."""


@dataclass(frozen=True)
class Snapshot:
    """Sums at one time: calls and nanoseconds of each entry, CPU time of the engine, the time."""

    calls: dict[str, int]
    ns: dict[str, int]
    cpu_s: float
    at: float


class Accounts:
    """Counters shared with the engine's processes."""

    def __init__(self, file: Path, *, empty: bool = False) -> None:
        self._words = shared_words(file)
        self.environment = {
            "PYTHONPATH": str(INSIDE),
            "FLEETKEEPER_BENCHMARK_ACCOUNT": str(file),
            "FLEETKEEPER_BENCHMARK_ACCOUNT_EMPTY": "1" if empty else "",
        }

    def snapshot(self, cpu_s: float) -> Snapshot:
        """Return the present sums."""
        words = self._words.tolist()
        return Snapshot(
            {entry: words[2 * place] for place, entry in enumerate(ENTRIES)},
            {entry: words[2 * place + 1] for place, entry in enumerate(ENTRIES)},
            cpu_s,
            time.perf_counter(),
        )

    def close(self) -> None:
        """Unmap the counters."""
        self._words.release()


def per_call_ns(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Return the nanoseconds per call of each entry; 0 if it was not called."""
    return {
        entry: (after.ns[entry] - before.ns[entry])
        / max(1, after.calls[entry] - before.calls[entry])
        for entry in ENTRIES
    }


def figures_of(before: Snapshot, after: Snapshot, clock_ns: dict[str, float]) -> dict[str, float]:
    """Return microseconds per step and per request, and shares of the time and of the CPU time.

    Args:
        before: the sums at the beginning.
        after: the sums at the end.
        clock_ns: the clock's own cost per call of each entry; it is subtracted.
    """
    calls = {entry: after.calls[entry] - before.calls[entry] for entry in ENTRIES}
    ns = {
        entry: after.ns[entry] - before.ns[entry] - calls[entry] * clock_ns[entry]
        for entry in ENTRIES
    }
    steps, requests = calls["before_schedule"], calls["request"]
    if not steps or not requests:
        raise RuntimeError(f"the engine was idle, or our code is not in it: {calls}")
    between = sum(ns[entry] for entry in BETWEEN_STEPS)
    took_s, cpu_s = after.at - before.at, after.cpu_s - before.cpu_s
    return {
        "steps_per_s": steps / took_s,
        "requests_per_s": requests / took_s,
        "between_us": between / steps / 1e3,
        "beside_us": ns["while_running"] / steps / 1e3,
        "request_us": ns["request"] / requests / 1e3,
        "elsewhere_ms_per_s": (ns["publish"] + ns["tick"]) / took_s / 1e6,
        "between_ratio": between / took_s / 1e9,
        "cpu_ratio": sum(ns.values()) / cpu_s / 1e9,
        "clock_step_us": sum(clock_ns[entry] for entry in (*BETWEEN_STEPS, "while_running")) / 1e3,
        "clock_request_us": clock_ns["request"] / 1e3,
    }


def render(part: dict[str, Any], rounds: int, round_s: float) -> str:
    """Return the section of the report."""
    lines = [
        f"## CPU time of our code in a running engine: medians of {rounds} rounds of {round_s:.0f} s\n",
        (
            "CPU time of the threads that run our code, measured at every entry into it while the engine serves, so that "
            "other processes on the machine do not count. The cost of the clock itself was measured with nothing to time, "
            f"in a separate start, and is subtracted: {_span(part, 'clock_step_us')} us per step, "
            f"{_span(part, 'clock_request_us')} us per request. "
            "The workers wait while our code runs *between two steps*. The *share of all CPU time* is relative to all "
            "processes of the engine; if both cores are busy, throughput falls by that share.\n"
        ),
        "| clients | steps/s | requests/s | between two steps | share of time | in parallel with workers, per step | per request | **share of all CPU time** |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for clients, f in sorted(part["figures"].items(), key=lambda item: int(item[0])):
        lines.append(
            f"| {clients} | {f['steps_per_s']:.0f} | {f['requests_per_s']:.0f} | {f['between_us']:.0f} us "
            f"| {100 * f['between_ratio']:.2f}% | {f['beside_us']:.0f} us | {f['request_us']:.0f} us "
            f"| **{100 * f['cpu_ratio']:.2f}%** |"
        )
    return "\n".join(lines) + "\n"


def _span(part: dict[str, Any], key: str) -> str:
    found = sorted(figures[key] for figures in part["figures"].values())
    return f"{found[0]:.0f} to {found[-1]:.0f}"
