"""A client of the API server for tests on a busy machine."""

from __future__ import annotations

import asyncio
from typing import Any

from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError
from tests.support.guards import GUARD_S


class PatientClient(KubernetesClient):
    """Waits long for an answer, and sends again what the API server itself gave up: it waits 34 s for etcd."""

    async def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request and return the decoded response.

        Raises:
            ApiError: the server refused, or did not answer in time; 504 only for a POST.
        """
        async with asyncio.timeout(GUARD_S):
            while True:
                try:
                    return await super().request(method, path, **{"timeout_s": GUARD_S, **options})
                except ApiError as late:
                    if late.status != 504 or method == "POST":
                        raise
