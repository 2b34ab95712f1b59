"""`fleetkeeper-gateway serve` with parts in memory: main() as it is, without a cluster.

Started as `python -m tests.gateway.http.gateway_process URL`, with the address of the service.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

import aiohttp

from fleetkeeper_gateway import serve
from fleetkeeper_gateway.http.parts import Parts
from tests.gateway.http.world import StandIn, World


@contextlib.asynccontextmanager
async def _parts() -> AsyncIterator[Parts]:
    upstream = StandIn()
    upstream.url = sys.argv[1]
    async with aiohttp.ClientSession() as client:
        yield World(upstream, client).parts()


if __name__ == "__main__":
    serve.default_parts = _parts
    sys.exit(serve.main())
