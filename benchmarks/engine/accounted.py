"""How much of a running engine's processor time our code takes: timed at its entries, in place.

On a shared machine two engines differ by more than our code costs. The clock of a thread does not see
the neighbours; and timed in place, code runs with the cold caches that it has between a model's steps,
which a loop around it alone would hide.
"""

from __future__ import annotations

import mmap
import runpy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSIDE = Path(__file__).resolve().parent / "accounted"
ENTRIES: tuple[str, ...] = runpy.run_path(str(INSIDE / "sitecustomize.py"))["ENTRIES"]
BETWEEN_STEPS = ("before_schedule", "after_schedule", "after_update")
"""While the workers wait for the scheduler's thread."""


@dataclass(frozen=True)
class Look:
    """The sums so far: calls and nanoseconds of each entry, processor time of the engine, the time."""

    calls: dict[str, int]
    ns: dict[str, int]
    cpu_s: float
    at: float


class Accounts:
    """The words shared with the engine's processes."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(mmap.PAGESIZE))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)
        self._words = memoryview(self._memory).cast("Q")
        self.environment = {
            "PYTHONPATH": str(INSIDE),
            "FLEETKEEPER_BENCHMARK_ACCOUNT": str(file),
        }

    def look(self, cpu_s: float) -> Look:
        """The sums now."""
        words = self._words.tolist()
        return Look(
            {entry: words[2 * place] for place, entry in enumerate(ENTRIES)},
            {entry: words[2 * place + 1] for place, entry in enumerate(ENTRIES)},
            cpu_s,
            time.perf_counter(),
        )

    def close(self) -> None:
        """Unmaps the words."""
        self._words.release()
        self._memory.close()


def figures_of(before: Look, after: Look) -> dict[str, float]:
    """Microseconds a step and a request, and shares of the time and of the processor time."""
    ns = {entry: after.ns[entry] - before.ns[entry] for entry in ENTRIES}
    calls = {entry: after.calls[entry] - before.calls[entry] for entry in ENTRIES}
    steps, requests = calls["before_schedule"], calls["request"]
    if not steps or not requests:
        raise RuntimeError(f"the engine did nothing, or our code is not inside: {calls}")
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
    }


def render(part: dict[str, Any], rounds: int, round_s: float) -> str:
    """The section of the report."""
    lines = [
        f"## What our code takes of a running engine: medians of {rounds} rounds of {round_s:.0f} s\n",
        (
            "Processor time of the threads that run it, at every entry into it, while the engine serves: the "
            "neighbours of a shared machine do not show in it, and the clock's own cost does (0.7 us a look). "
            "*Between steps* the workers wait for it. *Of all processor time* is what it takes of what all "
            "processes of the engine take together: where both cores are busy, that much of the throughput.\n"
        ),
        "| clients | steps/s | requests/s | between two steps | of the time | beside the workers, a step | a request | **of all processor time** |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for clients, f in sorted(part["figures"].items(), key=lambda item: int(item[0])):
        lines.append(
            f"| {clients} | {f['steps_per_s']:.0f} | {f['requests_per_s']:.0f} | {f['between_us']:.0f} us "
            f"| {100 * f['between_ratio']:.2f}% | {f['beside_us']:.0f} us | {f['request_us']:.0f} us "
            f"| **{100 * f['cpu_ratio']:.2f}%** |"
        )
    return "\n".join(lines) + "\n"
