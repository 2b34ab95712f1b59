"""Reads of services before writes: the API server may know better than the cached copy.

A watch may be late. During a deletion with `--cascade=orphan`, the garbage collector removes the owner
of each child. A write that follows an older copy of the service gives the owner back, and then the
collector deletes the child with its pods.
"""

from __future__ import annotations

from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE
from fleetkeeper.common.values import Manifest
from fleetkeeper.runtime.queue import Key
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from fleetkeeper_kube.reading import as_map, version_of


class LiveServices:
    """A reader of services that updates the cache where it was behind."""

    def __init__(self, client: KubernetesClient, cache: Cache) -> None:
        self._client = client
        self._cache = cache

    async def is_unchanged(self, key: Key, resource: Manifest) -> bool:
        """Return whether the API server holds exactly this version of the service.

        If not, the service was changed, or its deletion was requested, or it is gone or was recreated.
        Then store what the API server holds in the cache, which queues the service.

        Raises:
            ApiError: the service could not be read.
        """
        live = await self._client.read(INFERENCE_SERVICE, key.namespace, key.name)
        known = resource["metadata"]
        if live is None:
            self._cache.drop_service(key, uid=known["uid"])
            return False
        uid = as_map(live.get("metadata")).get("uid")
        if uid == known["uid"] and version_of(live) == version_of(resource):
            return True
        self._cache.put_service(live)
        return False

    async def is_outdated(self, key: Key, resource: Manifest, problem: ApiError) -> bool:
        """Return whether a write of the service was refused because of its version.

        Assume that it was not if the service cannot be read.
        """
        if not (problem.is_absent or problem.is_stale):
            return False
        try:
            return not await self.is_unchanged(key, resource)
        except ApiError:
            return False
