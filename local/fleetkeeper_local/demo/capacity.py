"""The capacity of one replica on this machine, from which the load is chosen."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.load.client import CompletionClient, Outcome, Patience
from fleetkeeper_local.load.closed_loop import run_closed_loop
from fleetkeeper_local.load.schedule import Phase, Shape, plan_arrivals

CLIENTS = 16
"""Concurrent clients: more than a new engine's sequence limit, so that it is never idle."""
WARM_UP_S, MEASURED_S = 4.0, 12.0
SEED = 19
WITHOUT_TIER = {"": 1.0}


def measure_capacity(
    base_url: str,
    model: str,
    shape: Shape,
    seconds: float = MEASURED_S,
    warm_up_s: float = WARM_UP_S,
) -> float:
    """Return the requests of this shape that are answered per second while more always wait.

    Raises:
        LocalError: no request was answered.
    """
    answered = asyncio.run(_saturate(base_url, model, shape, seconds, warm_up_s))
    if not answered:
        raise LocalError(f"{base_url} answered no request within {warm_up_s + seconds:.0f} s")
    return answered / seconds


async def _saturate(
    base_url: str, model: str, shape: Shape, seconds: float, warm_up_s: float
) -> int:
    loop = asyncio.get_running_loop()
    begin_s = loop.time() + warm_up_s
    plan = plan_arrivals([Phase("capacity", 600.0, 10.0)], replace(shape, tiers=WITHOUT_TIER), SEED)
    answered = 0

    def count(outcome: Outcome) -> None:
        nonlocal answered
        answered += outcome.ok and loop.time() >= begin_s

    async with CompletionClient(base_url, model, patience=Patience(attempts=20)) as client:
        await run_closed_loop(
            client.send,
            itertools.cycle(plan),
            CLIENTS,
            on_answer=count,
            seconds=warm_up_s + seconds,
        )
    return answered
