"""A day of a service's series in a real Prometheus, for the console's tests.

The figures come from formulas, not from a measurement. They end where `console_fleet` is.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from aiohttp import ClientError, ClientSession

from fleetkeeper.fleet.view import ServiceKey
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.guards import GUARD_S

DAY_S: Final = 86_400.0
SAMPLE_S: Final = 60.0
LABELS: Final = {
    "OURS": 'service_namespace="{}",inference_service="{}"',
    "ENGINE": 'namespace="{}",inference_service="{}",pod="chat-0"',
}
"""By the word that stands for them below."""


def demand(ago_s: float) -> float:
    """The load between 0 and 1: highest now, and eight hours ago."""
    return 0.5 + 0.5 * math.cos(2 * math.pi * ago_s / (8 * 3600.0))


def growth(ago_s: float) -> float:
    """How fast the demand grows, at most 1; 0 while it shrinks."""
    return max(0.0, math.sin(2 * math.pi * ago_s / (8 * 3600.0)))


def wanted(ago_s: float) -> int:
    """The replicas: they follow the demand."""
    return 2 + round(3 * demand(ago_s))


def sequences(ago_s: float) -> int:
    """The limit of sequences."""
    return 96 if demand(ago_s) > 0.4 else 64


GAUGES: Final[dict[str, Callable[[float], float]]] = {
    "signal_queue_wait_seconds{OURS}": lambda ago: 0.1 + 0.13 * demand(ago) + 0.32 * growth(ago) ** 3 + 0.02 * math.sin(ago / 700),
    "objective_queue_wait_seconds{OURS}": lambda ago: 0.5 if ago < DAY_S / 2 else 0.7,
    "signal_batch_time_seconds{OURS}": lambda ago: 0.025 + 0.007 * demand(ago) + 0.016 * growth(ago) ** 2 + 0.0005 * math.sin(ago / 500),
    "objective_batch_time_seconds{OURS}": lambda _: 0.05,
    'decision_replicas{OURS,kind="allocated"}': wanted,
    'decision_replicas{OURS,kind="ready"}': lambda ago: wanted(ago + 240),
    "service_max_replicas{OURS}": lambda _: 8,
    "decision_limit_sequences{OURS}": sequences,
    "decision_limit_tokens{OURS}": lambda _: 4096,
    "memory_peak_ratio{ENGINE}": lambda ago: 0.69 + 0.02 * demand(ago),
}  # fmt: skip
RATES: Final[dict[str, Callable[[float], float]]] = {
    "arrivals_total{ENGINE}": lambda ago: 4 + 14.4 * demand(ago),
    'requests_total{ENGINE,outcome="tier_closed"}': lambda ago: max(0.0, 12 * (growth(ago) - 0.75)),
}  # fmt: skip
DECIDED: Final = {"replicas": wanted, "limits": sequences}


def exposition(now: float, key: ServiceKey) -> Iterator[str]:
    """Yield the lines of a day in OpenMetrics' text format: a metric's samples in a row."""
    for line in _lines(now):
        for word, labels in LABELS.items():
            line = line.replace(word, labels.format(*key))  # noqa: PLW2901 - the same line, more of it replaced
        yield line


def _lines(now: float) -> Iterator[str]:
    begin = now - DAY_S
    times = [begin + index * SAMPLE_S for index in range(int(DAY_S / SAMPLE_S) + 1)]
    seen = set[str]()

    def head(series: str, kind: str) -> Iterator[str]:
        name = f"fleetkeeper_{series.partition('{')[0].removesuffix('_total')}"
        if name not in seen:
            seen.add(name)
            yield f"# TYPE {name} {kind}"

    for series, figure in GAUGES.items():
        yield from head(series, "gauge")
        yield from (f"fleetkeeper_{series} {figure(now - at)} {at}" for at in times)
    for series, rate in RATES.items():
        yield from head(series, "counter")
        total = 0.0
        for at in times:
            total += rate(now - at) * SAMPLE_S
            yield f"fleetkeeper_{series} {total} {at}"
    for subject, subject_figure in DECIDED.items():
        series = f'service_decisions_total{{OURS,subject="{subject}"}}'
        yield from head(series, "counter")
        total = 0.0
        for at in times:
            total += subject_figure(now - at) != subject_figure(now - at + SAMPLE_S)
            yield f"fleetkeeper_{series} {total} {at}"
    yield "# EOF"


@asynccontextmanager
async def prometheus_of_a_day(directory: Path, now: float, key: ServiceKey) -> AsyncIterator[str]:
    """A real Prometheus with the day in its blocks; yields its URL."""
    text, data = directory / "day.openmetrics", directory / "blocks"
    text.write_text("\n".join(exposition(now, key)) + "\n")
    made = await asyncio.create_subprocess_exec(
        str(program_path("promtool")), "tsdb", "create-blocks-from", "openmetrics", str(text), str(data),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert await made.wait() == 0
    (directory / "prometheus.yaml").write_text("{}")
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        str(program_path("prometheus")),
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )
    try:
        await _ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def _ready(url: str) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + GUARD_S
    async with ClientSession() as session:
        while loop.time() < end:
            try:
                async with session.get(f"{url}/-/ready") as answer:
                    if answer.status == 200:
                        return
            except ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError("Prometheus was not ready")
