"""The client of the API server, by TLS."""

from __future__ import annotations

import asyncio
import gc

from fleetkeeper_gateway.kubernetes.settings import load_credentials
from fleetkeeper_gateway.services.watched import INFERENCE_SERVICES
from fleetkeeper_kube.client import KubernetesClient
from tests.support.gateway.gateway_world import GatewayWorld


def test_a_watch_that_is_given_up_leaves_no_socket(world: GatewayWorld) -> None:
    """An orderly end of TLS would wait for the server, beyond the end of the loop."""
    credentials = load_credentials(world.json_kubeconfig())

    async def begin_to_watch() -> None:
        async with (
            KubernetesClient(credentials) as client,
            client.watch(INFERENCE_SERVICES, None, resource_version="0", server_timeout_s=60),
        ):
            return

    for _ in range(5):
        asyncio.run(begin_to_watch())
        gc.collect()  # pytest makes an error of each socket that is still open
