"""Services from a watch of the cluster's InferenceServices.

Without the API server the last known services stay: a Service's address does not change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Final

from fleetkeeper_gateway.interfaces import Service
from fleetkeeper_gateway.kubernetes.settings import load_credentials
from fleetkeeper_gateway.kubernetes.watch import USER_AGENT, Watch
from fleetkeeper_gateway.services import metrics
from fleetkeeper_gateway.services.index import ServiceIndex
from fleetkeeper_gateway.services.settings import ServicesSettings
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import Credentials
from fleetkeeper_kube.resource import Resource

INFERENCE_SERVICES: Final = Resource(
    "InferenceService", "inferenceservices", "v1alpha1", "fleetkeeper.io"
)


class WatchedServices:
    """The InferenceServices of some namespaces, or of all."""

    def __init__(self, settings: ServicesSettings, credentials: Credentials) -> None:
        """Take the parts; `run` watches the services."""
        self._index = ServiceIndex()
        self._client = KubernetesClient(credentials, user_agent=USER_AGENT)
        self.watch = Watch(
            self._client, INFERENCE_SERVICES, self._index, namespaces=settings.namespaces
        )

    @property
    def synced(self) -> bool:
        """Return True after the first complete list."""
        return self.watch.synced

    @property
    def contact_age_s(self) -> float:
        """Return the seconds since the API server last confirmed the services; NaN: never."""
        last = self.watch.last_contact
        return math.nan if last is None else time.monotonic() - last

    def serving(self, model: str) -> Sequence[Service]:
        """Return the services that serve a model, of all namespaces."""
        return self._index.serving(model)

    def named(self, namespace: str, name: str) -> Service | None:
        """Return a service by its name."""
        return self._index.named(namespace, name)

    def all(self) -> Iterable[Service]:
        """Return all services."""
        return self._index.all()

    async def run(self) -> None:
        """Watch the InferenceServices until cancelled."""
        metrics.CONTACT_AGE.set_function(lambda: self.contact_age_s)
        async with self._client:
            await self.watch.run()


def create_services(settings: ServicesSettings) -> WatchedServices:
    """Return the services that the settings describe; call `run` in a task.

    Raises:
        NoCredentials: the API server's address or our credentials cannot be loaded.
    """
    return WatchedServices(settings, load_credentials(settings.kubeconfig))
