"""`fleetkeeper keys`: what it prints is accepted by the gateway, and what it ends is not."""

from __future__ import annotations

import time

import pytest
import yaml

from fleetkeeper_contract.client_key_entries import digest_of, is_key
from fleetkeeper_gateway.interfaces import KeyRefused
from fleetkeeper_gateway.keys import WatchedKeys
from tests.support.gateway.client_keys import key_of
from tests.support.gateway.gateway_world import GatewayWorld, running, until
from tests.support.operators.command import Ran


def code_of(keys: WatchedKeys, key: str) -> str:
    """Return `ok`, or the code with which the gateway refuses a key."""
    try:
        keys.authenticate(f"Bearer {key}", time.time())
    except KeyRefused as refused:
        return refused.code
    return "ok"


def key_in(ran: Ran) -> str:
    """Return the key that a command printed, which is all of its standard output."""
    assert ran.code == 0, ran
    key = ran.out.removesuffix("\n")
    assert is_key(key)
    assert key not in ran.err
    return key


@pytest.mark.promise("key-digests")
async def test_a_key_lives_from_create_over_rotate_to_revoke(world: GatewayWorld) -> None:
    keys = world.keys()
    async with running(keys):
        # A key of the first list is no change.
        await until("the list", lambda: keys.synced)
        old = key_in(await world.command("create", "chat", "-n", "team-a", "--expires", "90d"))
        await until("the key", lambda: code_of(keys, old) == "ok")

        new = key_in(await world.command("rotate", "chat"))
        await until("the new one", lambda: code_of(keys, new) == "ok")
        assert code_of(keys, old) == "ok"
        assert keys.in_force("chat", time.time())

        again = await world.command("rotate", "chat")
        assert again.code == 1
        assert "--finish" in again.err

        assert (await world.command("rotate", "chat", "--finish")).code == 0
        await until("the old one's end", lambda: code_of(keys, old) == "invalid_api_key")
        assert code_of(keys, new) == "ok"

        lost = key_in(await world.command("rotate", "chat"))
        await until("the lost one", lambda: code_of(keys, lost) == "ok")
        assert (await world.command("rotate", "chat", "--cancel")).code == 0
        await until("the lost one's end", lambda: code_of(keys, lost) == "invalid_api_key")
        assert code_of(keys, new) == "ok"

        assert (await world.command("revoke", "chat")).code == 0
        await until("the end", lambda: code_of(keys, new) == "invalid_api_key")
    changes = [(change, actor) for _, change, actor in world.audit.changes]
    assert changes[0] == ("created", "fleetkeeper-keys")
    assert changes[-1] == ("revoked", None)
    assert changes[1:-1] == [("rotated", "fleetkeeper-keys")] * 4


async def test_a_grace_ends_the_old_secret_by_itself(world: GatewayWorld) -> None:
    old = key_in(await world.command("create", "chat", "-n", "team-a"))
    new = key_in(await world.command("rotate", "chat", "--grace", "24h"))
    entries = world.key_entries("chat")
    assert entries["sha256"] == f"{digest_of(old)},{digest_of(new)}"
    keys = world.keys()
    async with running(keys):
        await until("the list", lambda: keys.synced)
        assert keys.authenticate(f"Bearer {old}", time.time()).id == "chat"
        tomorrow = time.time() + 25 * 3600
        with pytest.raises(KeyRefused):
            keys.authenticate(f"Bearer {old}", tomorrow)
        assert keys.authenticate(f"Bearer {new}", tomorrow).id == "chat"


async def test_a_manifest_writes_nothing_and_is_accepted_once_applied(
    world: GatewayWorld,
) -> None:
    ran = await world.command(
        *("create", "chat", "-n", "team-a", "-n", "team-b", "--model", "llama-*"),
        *("--highest-tier", "realtime", "--tokens-per-minute", "realtime=1000,batch=9"),
        *("--title", "Chat of team A", "--manifest"),
    )
    assert ran.code == 0, ran
    key = ran.err.splitlines()[-1]
    assert is_key(key)
    assert key not in ran.out
    assert (await world.command("list")).out == ""
    world.apply(*yaml.safe_load_all(ran.out))
    keys = world.keys()
    async with running(keys):
        await until("the list", lambda: keys.synced)
        found = keys.authenticate(f"Bearer {key}", time.time())
    assert (found.id, found.name, found.models) == ("chat", "Chat of team A", ("llama-*",))
    assert found.namespaces == frozenset({"team-a", "team-b"})
    rotated = await world.command("rotate", "chat", "--manifest")
    assert digest_of(key) == world.key_entries("chat")["sha256"], "the cluster has the old one"
    world.apply(*yaml.safe_load_all(rotated.out))
    both = f"{digest_of(key)},{digest_of(rotated.err.splitlines()[-1])}"
    assert world.key_entries("chat")["sha256"] == both


async def test_the_list_shows_state_and_no_secret(world: GatewayWorld) -> None:
    empty = await world.command("list")
    assert (empty.code, empty.out) == (0, "")
    assert "keys create" in empty.err
    world.put_key("broken", key_of(1), highestTier="urgent")
    world.put_key("ended", key_of(2), expires="2020-01-01T00:00:00Z")
    world.put_key("one", key_of(3))
    world.put_key("two", key_of(3))
    world.put_key("live", key_of(4), concurrency="batch=2", requestsPerMinute="100")
    ran = await world.command("list")
    rows = {line.split()[0]: line for line in ran.out.splitlines()[1:]}
    assert "highestTier" in rows["broken"]
    assert rows["ended"].endswith("expired")
    assert "same digest" in rows["one"]
    assert "same digest" in rows["two"]
    assert rows["live"].endswith("in force")
    assert "requests/min:100 concurrency:batch=2" in rows["live"]
    for number in range(1, 5):
        assert key_of(number) not in ran.out
        assert digest_of(key_of(number)) not in ran.out


async def test_errors_say_what_to_do_and_change_nothing(world: GatewayWorld) -> None:
    key_in(await world.command("create", "chat", "-n", "team-a"))
    before = world.key_entries("chat")
    taken = await world.command("create", "chat", "-n", "team-b")
    assert (taken.code, taken.out) == (1, "")
    assert "already exists" in taken.err
    assert "another name" in taken.err
    idle = await world.command("rotate", "chat", "--finish")
    assert idle.code == 1
    assert "not being rotated" in idle.err
    absent = await world.command("revoke", "absent")
    assert absent.code == 1
    assert "fleetkeeper keys list" in absent.err
    stranger = world.plane.user_kubeconfig(f"{world.user}-stranger")
    denied = await world.command("list", kubeconfig=stranger)
    assert denied.code == 1
    assert "forbidden" in denied.err
    assert "rights" in denied.err
    world.plane.kubectl("-n", world.keys_namespace, "create", "secret", "generic", "other")
    other = await world.command("revoke", "other")
    assert other.code == 1
    assert "no client key" in other.err
    world.plane.kubectl("-n", world.keys_namespace, "get", "secret", "other")
    assert world.key_entries("chat") == before
