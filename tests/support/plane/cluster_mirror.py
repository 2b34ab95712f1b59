"""A copy of one namespace, kept by a list and a watch for each resource.

It shares no cache, no reflector and no digest with the operator that is tested.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.resource import Resource


class ClusterMirror:
    """The objects of a namespace by kind and name; `changed` is set at every event."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.changed = asyncio.Event()
        self._client = client
        self._namespace = namespace

    async def keep(self, resource: Resource, synced: asyncio.Event) -> None:
        """Keep `objects` current for one resource until cancelled; set `synced` after the list."""
        while True:
            with suppress(ApiError, ValueError):  # the client truncates an object that is too large
                await self._keep_once(resource, synced)
            await asyncio.sleep(0.2)

    async def _keep_once(self, resource: Resource, synced: asyncio.Event) -> None:
        path = resource.path(self._namespace)
        listed = await self._client.request("GET", path, timeout_s=30)
        for key in [key for key in self.objects if key[0] == resource.kind]:
            del self.objects[key]
        for item in listed["items"]:
            self.objects[resource.kind, item["metadata"]["name"]] = item
        synced.set()
        self.changed.set()
        async with self._client.watch(
            resource,
            self._namespace,
            resource_version=listed["metadata"]["resourceVersion"],
            server_timeout_s=600,
        ) as lines:
            async for line in lines:
                event = json.loads(line)
                live = event["object"]
                if event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    self.objects.pop((resource.kind, live["metadata"]["name"]), None)
                elif event["type"] != "BOOKMARK":
                    self.objects[resource.kind, live["metadata"]["name"]] = live
                self.changed.set()
