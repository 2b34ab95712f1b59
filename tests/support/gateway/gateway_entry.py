"""`fleetkeeper-gateway`, with the names of services resolved as SERVICE_ADDRESSES says.

The gateway calls a service by its name in the cluster, at port 80. No such name exists outside a
cluster, so this process alone gets the addresses from a JSON object: {"chat.team-a.svc": 8001} or
{"*": 8001}, each a port of 127.0.0.1. Everything else is the program as it is shipped.
"""

from __future__ import annotations

import json
import os
import socket

from aiohttp import ThreadedResolver
from aiohttp.abc import ResolveResult

from fleetkeeper_gateway.cli import main

SUFFIX = ".svc"


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


if __name__ == "__main__":
    resolve_services()
    main()
