"""Who is let in: by the header, by the time, and while the API server is away."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.interfaces import Key, KeyRefused, Service
from fleetkeeper_gateway.keys.anonymous import AnonymousKeys
from fleetkeeper_gateway.keys.bearer import digest_of_header
from fleetkeeper_gateway.keys.settings import KeysSettings
from fleetkeeper_gateway.keys.watched import WatchedKeys, create_keys
from fleetkeeper_kube.reflector import TRIES_BEFORE_LIST
from tests.support.gateway.client_keys import RecordedAudit, key_entries, key_of, key_secret
from tests.support.gateway.gateway_world import until
from tests.support.plane.list_watch_server import ListWatchServer

NOW = 1_900_000_000.0


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def keys_of(
    server: ListWatchServer, clock: Clock | None = None, *, stale_s: float = 3600.0
) -> AsyncIterator[WatchedKeys]:
    settings = KeysSettings(keys_stale_seconds=stale_s)
    keys = WatchedKeys(settings, server.credentials, RecordedAudit(), monotonic=clock or Clock())
    task = asyncio.create_task(keys.run())
    try:
        await server.until(lambda: server.watches >= 1)
        yield keys
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def serving(**entries: str) -> AsyncIterator[ListWatchServer]:
    """Serve the Secret `chat` with key 1."""
    async with ListWatchServer() as server:
        await server.put(key_secret("chat", key_entries(key_of(1), **entries)))
        yield server


def bearer(number: int) -> str:
    return f"Bearer {key_of(number)}"


def refusal(
    keys: WatchedKeys, authorization: str | None, now: float = NOW
) -> tuple[str, str | None]:
    with pytest.raises(KeyRefused) as refused:
        keys.authenticate(authorization, now)
    for number in range(3):
        assert key_of(number) not in str(refused.value)
    return refused.value.code, refused.value.key_id


def named_refusal(
    keys: WatchedKeys | AnonymousKeys, key_id: str, now: float = NOW
) -> tuple[str, str | None]:
    with pytest.raises(KeyRefused) as refused:
        keys.named(key_id, now)
    return refused.value.code, refused.value.key_id


async def test_a_key_is_accepted_with_what_its_secret_says() -> None:
    entries = {
        "name": "Chat of team A",
        "namespaces": "team-a,team-b",
        "models": "llama-*",
        "highestTier": "realtime",
        "expires": "2090-01-01T00:00:00Z",
        "requestsPerMinute": "100",
        "concurrency": "realtime=2",
    }
    async with serving(**entries) as server, keys_of(server) as keys:
        key = keys.authenticate(bearer(1), NOW)
        assert (key.id, key.name, key.highest) == ("chat", "Chat of team A", Tier.REALTIME)
        assert (key.namespaces, key.models) == (frozenset({"team-a", "team-b"}), ("llama-*",))
        assert key.limits[Tier.REALTIME].concurrency == 2
        assert key.limits[Tier.BATCH].concurrency is None
        assert {limits.requests_per_minute for limits in key.limits.values()} == {100}
        assert key_of(1) not in repr(key)
        assert keys.authenticate(f"bearer   {key_of(1)} ", NOW) == key


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        (bearer(2), "invalid_api_key"),
        (f"Basic {key_of(1)}", "invalid_api_key"),
        (key_of(1), "invalid_api_key"),
        ("Bearer", "invalid_api_key"),
        ("Bearer sk-1234", "invalid_api_key"),
        (f"{bearer(1)}, {bearer(1)}", "invalid_api_key"),
        (f"{bearer(1)}x", "invalid_api_key"),
    ],
)
async def test_what_is_no_key_of_ours_is_refused(authorization: str | None, code: str) -> None:
    async with serving() as server, keys_of(server) as keys:
        assert refusal(keys, authorization) == (code, None)


@given(st.text(max_size=120))
def test_any_header_is_a_digest_or_refused(authorization: str) -> None:
    with suppress(KeyRefused):
        assert len(digest_of_header(authorization)) == 32


async def test_an_expired_key_is_refused_with_its_id_for_the_audit_log() -> None:
    async with serving(expires="2030-01-01T00:00:00Z") as server, keys_of(server) as keys:
        end = 1893456000.0
        assert keys.authenticate(bearer(1), end - 0.1).id == "chat"
        assert keys.in_force("chat", end - 0.1)
        assert refusal(keys, bearer(1), end) == ("expired_api_key", "chat")
        assert not keys.in_force("chat", end)


async def test_a_key_whose_secret_is_gone_is_not_in_force() -> None:
    async with serving() as server, keys_of(server) as keys:
        assert keys.in_force("chat", NOW)
        await server.remove("chat")
        await until("the key ends", lambda: not keys.in_force("chat", NOW))
        assert refusal(keys, bearer(1)) == ("invalid_api_key", None)


@pytest.mark.parametrize("stale_s", [0.0, 119.0])
def test_a_time_that_ends_between_two_signs_of_the_server_is_refused(stale_s: float) -> None:
    with pytest.raises(ValidationError, match="keys_stale_seconds"):
        KeysSettings(keys_stale_seconds=stale_s)


async def test_a_key_is_found_by_its_id_while_it_is_in_force() -> None:
    async with serving(expires="2030-01-01T00:00:00Z") as server, keys_of(server) as keys:
        end = 1893456000.0
        assert keys.named("chat", end - 0.1) is keys.authenticate(bearer(1), end - 0.1)
        assert named_refusal(keys, "chat", end) == ("expired_api_key", "chat")
        assert named_refusal(keys, "other", NOW) == ("invalid_api_key", "other")
        await server.remove("chat")
        await until("the key ends", lambda: not keys.in_force("chat", end - 0.1))
        assert named_refusal(keys, "chat", end - 0.1) == ("invalid_api_key", "chat")


async def test_a_key_whose_digest_another_one_has_is_not_found_by_its_id() -> None:
    async with serving() as server, keys_of(server) as keys:
        assert keys.named("chat", NOW).id == "chat"
        await server.put(key_secret("copy", key_entries(key_of(1))))
        await until("the key ends", lambda: not keys.in_force("chat", NOW))
        assert named_refusal(keys, "chat") == ("invalid_api_key", "chat")


async def test_without_the_server_no_key_is_found_by_its_id() -> None:
    async with serving() as server:
        keys = WatchedKeys(KeysSettings(), server.credentials, RecordedAudit())
        assert named_refusal(keys, "chat") == ("keys_unavailable", None)


async def test_before_the_first_list_no_key_can_be_checked() -> None:
    async with serving() as server:
        keys = WatchedKeys(KeysSettings(), server.credentials, RecordedAudit())
        assert not keys.synced
        assert math.isnan(keys.contact_age_s)
        assert refusal(keys, bearer(1)) == ("keys_unavailable", None)
        assert refusal(keys, None) == ("missing_api_key", None), "the client can correct this"


@pytest.mark.promise("key-unreachable-server")
async def test_without_the_server_known_keys_serve_for_the_set_time_and_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    async with serving() as server, keys_of(server, clock, stale_s=600.0) as keys:
        server.list_status = server.watch_status = 503
        await server.cut()
        await server.until(lambda: keys.watch.failures >= TRIES_BEFORE_LIST)
        clock.now_s += 600.0
        assert keys.authenticate(bearer(1), NOW).id == "chat"
        assert keys.contact_age_s == 600.0
        clock.now_s += 0.1
        assert refusal(keys, bearer(1)) == ("keys_unavailable", None)
        assert refusal(keys, bearer(2)) == ("keys_unavailable", None)
        assert keys.in_force("chat", NOW), "requests in progress end by themselves"
        server.list_status = server.watch_status = 200
        await server.until(lambda: not keys.is_stale)
        assert keys.authenticate(bearer(1), NOW).id == "chat"
    said = capsys.readouterr().out
    assert said.count("watch failed; retrying") == 1, "once, not at each retry"
    assert said.count("watch restored") == 1


async def test_in_anonymous_mode_no_header_matters() -> None:
    keys = create_keys(
        KeysSettings(
            anonymous=True,
            anonymous_highest_tier="batch",
            anonymous_requests_per_minute="60",
            anonymous_concurrency="batch=4",
        )
    )
    assert keys.synced
    key = keys.authenticate(None, NOW)
    assert (key.id, key.namespaces, key.highest) == ("anonymous", None, Tier.BATCH)
    assert key.limits[Tier.BATCH].concurrency == 4
    assert key.limits[Tier.STANDARD].requests_per_minute == 60
    assert keys.authenticate("Bearer sk-dummy", NOW) is key
    assert keys.in_force("anonymous", NOW)
    assert keys.named("anonymous", NOW) is key
    assert named_refusal(keys, "chat") == ("invalid_api_key", "chat")
    assert not keys.in_force("chat", NOW)


def service_in(namespace: str) -> Service:
    return Service(namespace, "s", "uid", ("m",), "http://s", False, "Ready", True, 0)


NAMES = st.text(st.sampled_from("ab-*?[]."), min_size=1, max_size=6)


@pytest.mark.promise("key-namespaces")
@given(st.frozensets(NAMES, max_size=3), NAMES, st.lists(NAMES, max_size=3), NAMES)
def test_a_key_sees_no_model_of_another_namespace(
    namespaces: frozenset[str], namespace: str, globs: list[str], model: str
) -> None:
    sees = Key("k", "k", namespaces, tuple(globs)).sees(service_in(namespace), model)
    if namespace not in namespaces or not globs:
        assert not sees, "namespaces are names, whatever they look like"
    elif "*" in globs:
        assert sees
    assert Key("k", "k", None, ("*",)).sees(service_in(namespace), model)
