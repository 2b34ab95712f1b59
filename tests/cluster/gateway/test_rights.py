"""The gateway's rights are enough for it, and give nothing else away."""

from __future__ import annotations

import pytest

from fleetkeeper_local.control_plane.access import KubectlError
from tests.support.gateway.client_keys import key_of
from tests.support.gateway.gateway_world import MARKS, GatewayWorld, running, until


async def test_with_its_rights_alone_the_gateway_knows_services_and_keys(
    world: GatewayWorld,
) -> None:
    world.put_service("chat")
    world.put_key("chat", key_of(1))
    services, keys = world.services(), world.keys()
    async with running(services), running(keys):
        await until("services and keys", lambda: services.synced and keys.synced)
        assert services.named(world.namespace, "chat") is not None
        assert len(keys.store) == 1
        assert services.watch.failures + keys.watch.failures == 0


DENIED = (
    ("list", "secrets", False),
    ("get", "secrets", False),
    ("create", "secrets", True),
    ("update", "secrets", True),
    ("delete", "secrets", True),
    ("get", "configmaps", True),
    ("get", "configmaps", False),
    ("list", "configmaps", False),
    ("patch", "configmaps", False),
    ("patch", "configmaps/fleetkeeper-settings", False),
    ("create", "configmaps", False),
    ("get", f"configmaps/{MARKS}", False),
    ("update", f"configmaps/{MARKS}", False),
    ("delete", f"configmaps/{MARKS}", False),
    ("list", "pods", False),
    ("update", "inferenceservices.fleetkeeper.io", False),
)
"""Verb, resource, and whether in the keys namespace."""


@pytest.mark.promise("gateway-reads")
def test_it_has_no_other_right(world: GatewayWorld) -> None:
    kubeconfig = world.plane.user_kubeconfig(world.user)

    def ask(verb: str, resource: str, namespace: str) -> None:
        arguments = ("-n", namespace, "auth", "can-i", verb, resource, "--quiet")
        world.plane.kubectl(*arguments, kubeconfig=kubeconfig)

    ask("list", "secrets", world.keys_namespace)
    ask("patch", f"configmaps/{MARKS}", world.namespace)
    for verb, resource, in_keys_namespace in DENIED:
        with pytest.raises(KubectlError):
            ask(verb, resource, world.keys_namespace if in_keys_namespace else world.namespace)
