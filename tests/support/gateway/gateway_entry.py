"""`fleetkeeper-gateway`, with names of services resolved by SERVICE_ADDRESSES, and patient if asked.

The gateway calls a service by its name in the cluster, at port 80. No such name exists outside a
cluster, so this process alone gets the addresses from a JSON object: {"chat.team-a.svc": 8001} or
{"*": 8001}, each a port of 127.0.0.1. With FLEETKEEPER_GATEWAY_WAITS_FOR_REDIS the limits are not
local to a process that a busy machine stopped for 40 ms, in tests of processes that share limits.
Everything else is the program as it is shipped.
"""

from __future__ import annotations

import json
import os
import socket
from functools import partial

from aiohttp import ThreadedResolver
from aiohttp.abc import ResolveResult

from fleetkeeper_gateway import limits
from fleetkeeper_gateway.cli import main

SUFFIX = ".svc"
PATIENCE_S = 400.0


def resolve_services() -> None:
    """Replace how aiohttp resolves names that end in .svc."""
    ports: dict[str, int] = json.loads(os.environ["SERVICE_ADDRESSES"])
    others = ThreadedResolver.resolve

    async def resolve(
        resolver: ThreadedResolver,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_INET,
    ) -> list[ResolveResult]:
        if not host.endswith(SUFFIX):
            return await others(resolver, host, port, family)
        return [
            ResolveResult(
                hostname=host,
                host="127.0.0.1",
                port=ports.get(host) or ports["*"],
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        ]

    ThreadedResolver.resolve = resolve  # type: ignore[method-assign, assignment]


def wait_for_redis() -> None:
    """Replace the time that a request waits for Redis."""
    create = limits.create_limiter
    limits.create_limiter = partial(create, timing=limits.Timing(budget_s=PATIENCE_S))


if __name__ == "__main__":
    resolve_services()
    if "FLEETKEEPER_GATEWAY_WAITS_FOR_REDIS" in os.environ:
        wait_for_redis()
    main()
