"""The capacity of one replica on this machine, from which the load is chosen."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.load.client import CompletionClient, Patience
from fleetkeeper_local.load.open_loop import prompt_of
from fleetkeeper_local.load.schedule import Phase, Shape, plan_arrivals

CLIENTS = 16
"""Concurrent clients: more than a new engine's sequence limit, so that it is never idle."""
WARM_UP_S, MEASURED_S = 4.0, 12.0
SEED = 19


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
    requests = itertools.cycle(plan_arrivals([Phase("capacity", 600.0, 10.0)], shape, SEED))
    loop = asyncio.get_running_loop()
    begin_s = loop.time() + warm_up_s
    end_s = begin_s + seconds
    answered = 0

    async def keep_asking(client: CompletionClient) -> None:
        nonlocal answered
        while True:
            request = next(requests)
            outcome = await client.complete(
                prompt_of(request), request.output_tokens, session=request.session
            )
            answered += outcome.ok and loop.time() >= begin_s

    async with CompletionClient(base_url, model, patience=Patience(attempts=20)) as client:
        with suppress(TimeoutError):
            # Requests in flight at the end are dropped; the engine aborts them.
            async with asyncio.timeout_at(end_s), asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(keep_asking(client))
    return answered
