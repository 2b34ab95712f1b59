"""What one replica can do on this machine: load is chosen by it, not by a number for all machines."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

from fleetkeeper_local.errors import LocalError
from fleetkeeper_local.load.client import CompletionClient, Patience
from fleetkeeper_local.load.open_loop import prompt_of
from fleetkeeper_local.load.schedule import Phase, Shape, plan_arrivals

CLIENTS = 16
"""At once: more than the sequences that a young engine is first limited to, so that it is never idle."""
WARM_UP_S, MEASURED_S = 4.0, 12.0
SEED = 19


def measure_capacity(
    base_url: str,
    model: str,
    shape: Shape,
    seconds: float = MEASURED_S,
    warm_up_s: float = WARM_UP_S,
) -> float:
    """Requests of this shape that are answered in a second while there is always one waiting.

    Raises:
        LocalError: none was answered.
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
            # What is under way at the end is hung up on: the engine drops it.
            async with asyncio.timeout_at(end_s), asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(keep_asking(client))
    return answered
