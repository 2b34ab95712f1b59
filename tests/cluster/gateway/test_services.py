"""Services follow the InferenceServices of the cluster, or of some namespaces."""

from __future__ import annotations

import asyncio
import json

from fleetkeeper_gateway.services import WatchedServices
from tests.support.gateway.gateway_world import (
    SERVICE_RULES,
    GatewayWorld,
    role,
    running,
    until,
)


def paths(services: WatchedServices, model: str) -> list[str]:
    """Return the services that serve a model."""
    return sorted(service.path for service in services.serving(model))


async def test_services_are_found_by_each_of_their_names(world: GatewayWorld) -> None:
    services = world.services()
    kubectl = world.plane.kubectl
    async with running(services):
        await until("the list", lambda: services.synced)
        adapters = [{"name": "legal", "source": "pvc://models/legal"}]
        await asyncio.to_thread(
            world.put_service, "chat", servedName="org/llama", adapters=adapters
        )
        path = f"{world.namespace}/chat"
        await until("the served name", lambda: path in paths(services, "org/llama"))
        assert path in paths(services, "legal")
        assert path not in paths(services, "chat")
        found = services.named(world.namespace, "chat")
        assert found is not None
        uid = kubectl("-n", world.namespace, "get", "fis", "chat", "-o", "jsonpath={.metadata.uid}")
        assert (found.uid, found.url) == (uid, "")
        assert (found.ready, found.state, found.demands_grant) == (False, "Unknown", False)
        assert found.created > 1_700_000_000

        condition = {
            "type": "Available",
            "status": "True",
            "reason": "Answering",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        url = f"http://chat.{world.namespace}.svc:80"
        status = json.dumps({"status": {"url": f"{url}/v1", "conditions": [condition]}})
        await asyncio.to_thread(
            kubectl,
            *("-n", world.namespace, "patch", "fis", "chat", "--subresource=status"),
            *("--type=merge", "-p", status),
        )
        await until("readiness", lambda: all(one.ready for one in services.serving("legal")))
        assert [one.url for one in services.serving("legal")] == [url]

        await asyncio.to_thread(world.put_service, "chat", servedName="org/qwen")
        await until("the new name", lambda: path in paths(services, "org/qwen"))
        assert path not in paths(services, "org/llama")

        await asyncio.to_thread(kubectl, "-n", world.namespace, "delete", "fis", "chat")
        await until("the end", lambda: services.named(world.namespace, "chat") is None)
        assert path not in paths(services, "org/qwen")
        assert services.watch.reflectors[0].lists == 1


async def test_with_rights_in_one_namespace_that_one_is_served(world: GatewayWorld) -> None:
    plane, name = world.plane, f"{world.namespace}-part"
    plane.kubectl("create", "namespace", name)
    world.user = f"{world.user}-part"
    world.apply(*role("Role", "services", name, SERVICE_RULES, world.user))
    world.put_service("inside", name)
    world.put_service("outside")
    services = world.services(name, world.namespace)
    async with running(services):
        await until("what may be read", lambda: services.synced)
        assert [service.path for service in services.all()] == [f"{name}/inside"]
        world.apply(*role("Role", "services", world.namespace, SERVICE_RULES, world.user))
        await until("what may be read now", lambda: len(list(services.all())) == 2)
