"""What a hostile engine pod answers on its control port instead of metrics."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from random import Random
from typing import Final

from aiohttp import web

CHUNK: Final = b'fleetkeeper_running{tier="realtime",x="%s"} 1\n' * 1000
ENDLESS_BYTES: Final = 2 * 1024**3
SLOW_S: Final = 120.0


class Hostility(StrEnum):
    """How a pod answers."""

    GARBAGE = "garbage"
    ENDLESS = "gigabytes"
    SLOW = "one byte a second"
    FORGED = "labels of other pods"


async def hostile_answer(
    request: web.Request, how: Hostility, genuine: str, victims: list[str]
) -> web.StreamResponse:
    """Answer a read of metrics; `genuine` is what an honest pod would say."""
    if how is Hostility.GARBAGE:
        return web.Response(body=Random(time.time_ns()).randbytes(65536), content_type="text/plain")
    if how is Hostility.FORGED:
        return web.Response(text=_forged(genuine, victims))
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    if how is Hostility.ENDLESS:
        for _ in range(ENDLESS_BYTES // len(CHUNK)):
            await response.write(CHUNK)
    else:
        ends = time.monotonic() + SLOW_S
        while time.monotonic() < ends:
            await response.write(b"f")
            await asyncio.sleep(1)
    return response


def _forged(genuine: str, victims: list[str]) -> str:
    """Return an idle engine's metrics under the names of other pods, which are in truth busy."""
    lines = [line for line in genuine.splitlines() if line and not line.startswith("#")]
    forged = []
    for victim in victims:
        for line in lines:
            name, _, number = line.rpartition(" ")
            base, _, labels = name.partition("{")
            inside = labels.rstrip("}")
            row = ",".join(part for part in (inside, f'pod="{victim}"') if part)
            forged.append(f"{base}{{{row}}} {0 if 'total' in base else number}")
    return "\n".join(forged) + "\n"
