"""Right after a start: services whose spec changed while nobody led do not wait for the whole fleet.

To list all that a thousand services own takes seconds; what one of them owns is a few small lists.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fleetkeeper.adapters.kubernetes.client import KubernetesClient
from fleetkeeper.adapters.kubernetes.reflector import SELECTOR
from fleetkeeper.adapters.kubernetes.resources import WATCHED, Resource
from fleetkeeper.api.names import LABEL_SERVICE
from fleetkeeper.runtime.cache import Cache
from fleetkeeper.runtime.queue import Key

MOST_SERVICES: Final = 20
"""Where more of them changed, the lists of the whole fleet are the shorter way."""


def services_behind(cache: Cache) -> list[Key]:
    """Services whose status does not tell of their spec; none where there are too many."""
    behind = []
    for key in cache.services():
        entry = cache.service(key)
        if entry is not None and not entry.is_observed:
            behind.append(key)
    return behind if len(behind) <= MOST_SERVICES else []


async def observe_service(client: KubernetesClient, cache: Cache, key: Key) -> None:
    """Reads into the cache all that carries the labels of one service.

    Raises:
        ApiError: a list failed; what was read until then stands.
    """
    async with asyncio.TaskGroup() as group:
        for resource in WATCHED:
            group.create_task(_observe(client, cache, resource, key))


async def _observe(client: KubernetesClient, cache: Cache, resource: Resource, key: Key) -> None:
    selector = f"{SELECTOR},{LABEL_SERVICE}={key.name}"
    async for page in client.list_pages(resource, key.namespace, selector=selector):
        for live in page.get("items") or ():
            cache.take(resource.kind, live)
