"""Early reads, right after a start, for services whose spec changed while no operator was leading.

Listing the objects of a thousand services takes seconds. Those of one service are a few small lists,
so the services that changed do not wait for the whole fleet.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.reflector import SELECTOR
from fleetkeeper.adapters.kubernetes.resources import WATCHED, Resource
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache

MAX_SERVICES: Final = 20
"""If more services than this changed, listing the whole fleet is faster."""


def services_behind(cache: Cache) -> list[Key]:
    """Return the services whose status is behind their spec; none if there are too many."""
    behind = []
    for key in cache.services():
        entry = cache.service(key)
        if entry is not None and not entry.is_observed:
            behind.append(key)
    return behind if len(behind) <= MAX_SERVICES else []


async def observe_service(client: KubernetesClient, cache: Cache, key: Key) -> None:
    """Read all objects that carry the labels of one service into the cache.

    Raises:
        ApiError: a list failed; what was read before it stays in the cache.
    """
    async with asyncio.TaskGroup() as group:
        for resource in WATCHED:
            group.create_task(_observe(client, cache, resource, key))


async def _observe(client: KubernetesClient, cache: Cache, resource: Resource, key: Key) -> None:
    selector = f"{SELECTOR},{LABEL_SERVICE}={key.name}"
    async for page in client.list_pages(resource, key.namespace, selector=selector):
        for live in page.get("items") or ():
            cache.take(resource.kind, live)
