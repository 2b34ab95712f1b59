"""Keys follow the Secrets of their namespace, also when watches are cut or expire."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from fleetkeeper_gateway.interfaces import KeyRefused
from fleetkeeper_gateway.keys import WatchedKeys
from tests.support.gateway.client_keys import key_of
from tests.support.gateway.gateway_world import GatewayWorld, running, until
from tests.support.plane.watch_proxy import WatchProxy


def accepts(keys: WatchedKeys, number: int) -> bool:
    """Return whether a key is accepted now."""
    try:
        keys.authenticate(f"Bearer {key_of(number)}", time.time())
    except KeyRefused:
        return False
    return True


@pytest.mark.promise("key-revoked")
async def test_a_change_of_a_secret_is_in_force_at_its_event(world: GatewayWorld) -> None:
    world.put_key("first", key_of(1))
    keys = world.keys()
    async with running(keys):
        await until("the list", lambda: keys.synced)
        assert accepts(keys, 1)
        assert not accepts(keys, 2)

        await asyncio.to_thread(world.put_key, "second", key_of(2), models="llama-*")
        began = time.monotonic()
        await until("a new key", lambda: accepts(keys, 2))
        print(f"a new key was accepted {time.monotonic() - began:.3f} s after its write returned")

        await asyncio.to_thread(world.put_key, "second", key_of(2), models="qwen-*")
        header = f"Bearer {key_of(2)}"
        await until(
            "changed globs",
            lambda: keys.authenticate(header, time.time()).models == ("qwen-*",),
        )

        await asyncio.to_thread(world.delete_key, "second")
        began = time.monotonic()
        await until("a revoked key", lambda: not keys.in_force("second", time.time()))
        print(f"a revoked key ended {time.monotonic() - began:.3f} s after its deletion returned")
        assert not accepts(keys, 2)
        assert accepts(keys, 1)
        assert keys.watch.reflectors[0].lists == 1, "events tell of changes, no list"
    recorded = [(key, change) for key, change, _ in world.audit.changes]
    assert recorded == [("second", "created"), ("second", "changed"), ("second", "revoked")]
    assert world.audit.changes[0][2] == "kubectl-client-side-apply"


async def test_only_labelled_secrets_are_keys_and_a_malformed_one_is_refused_alone(
    world: GatewayWorld,
) -> None:
    world.put_key("good", key_of(1))
    world.put_key("broken", key_of(2), namespaces="*")
    world.plane.kubectl(
        *("-n", world.keys_namespace, "create", "secret", "generic", "other"),
        f"--from-literal=sha256={key_of(3)}",
    )
    keys = world.keys()
    async with running(keys):
        await until("the list", lambda: keys.synced)
        assert accepts(keys, 1)
        assert not accepts(keys, 2)
        assert keys.store.invalid.keys() == {"broken"}
        await asyncio.to_thread(
            world.plane.kubectl,
            *("-n", world.keys_namespace, "label", "secret", "good", "fleetkeeper.io/client-key-"),
        )
        await until("a key without its label", lambda: not accepts(keys, 1))


async def test_a_secret_with_a_finalizer_is_revoked_when_its_deletion_begins(
    world: GatewayWorld,
) -> None:
    world.put_key("held", key_of(1))
    patch = ("-n", world.keys_namespace, "patch", "secret", "held", "--type=merge", "-p")
    world.plane.kubectl(*patch, json.dumps({"metadata": {"finalizers": ["example.com/hold"]}}))
    keys = world.keys()
    try:
        async with running(keys):
            await until("the list", lambda: keys.synced and accepts(keys, 1))
            await asyncio.to_thread(world.delete_key, "held")
            await until("the key ends", lambda: not accepts(keys, 1))
    finally:
        world.plane.kubectl(*patch, json.dumps({"metadata": {"finalizers": None}}))


@pytest.mark.promise("gateway-alone")
@pytest.mark.parametrize("expired", [False, True])
async def test_known_keys_serve_while_watches_are_cut_and_what_was_missed_is_made_up(
    world: GatewayWorld, *, expired: bool
) -> None:
    world.put_key("stays", key_of(1))
    world.put_key("goes", key_of(2))
    async with WatchProxy(world.plane, world.user) as proxy:
        keys = world.keys(proxy.kubeconfig)
        async with running(keys):
            await until("the list", lambda: keys.synced)
            await asyncio.to_thread(world.put_key, "marker", key_of(9))
            await until("an event", lambda: accepts(keys, 9))
            proxy.cut_watches()
            await until("a failure", lambda: keys.watch.failures > 0)
            failures = keys.watch.failures
            await asyncio.to_thread(world.delete_key, "goes")
            await asyncio.to_thread(world.put_key, "comes", key_of(3))
            assert accepts(keys, 1), "a broken watch ends no key"
            proxy.heal_watches(expired=expired)
            await until("the new key", lambda: accepts(keys, 3))
            await until("the revoked key", lambda: not accepts(keys, 2))
            assert accepts(keys, 1)
            assert keys.watch.failures >= failures


async def test_an_error_within_a_watch_leads_to_a_new_list(world: GatewayWorld) -> None:
    world.put_key("stays", key_of(1))
    async with WatchProxy(world.plane, world.user) as proxy:
        keys = world.keys(proxy.kubeconfig)
        async with running(keys):
            await until("the list", lambda: keys.synced)
            await asyncio.to_thread(world.put_key, "marker", key_of(9))
            await until("an event", lambda: accepts(keys, 9))
            proxy.send_error("secrets", code=410)
            await until("a new list", lambda: keys.watch.reflectors[0].lists == 2)
            assert accepts(keys, 1)
