"""1,000 services and 10,000 keys: looking one up costs as much as with ten of each."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetkeeper_contract.client_key_entries import digest_of
from fleetkeeper_gateway.keys import KeysSettings, WatchedKeys
from fleetkeeper_gateway.keys.store import KeyStore
from fleetkeeper_gateway.services.index import ServiceIndex
from tests.support.gateway.client_keys import RecordedAudit, key_entries, key_of, key_secret
from tests.support.gateway.gateway_world import running, until
from tests.support.plane.list_watch_server import ListWatchServer

SERVICES, KEYS = 1_000, 10_000
LOOK_UPS = 20_000
FACTOR = 10
"""A look-up that walked through all would take a thousand times as long."""


def _seconds_a_look_up(look_up: Callable[[], object]) -> float:
    """Return the processor time of one look-up, the best of three series."""
    series = []
    for _ in range(3):
        began = time.process_time()
        for _ in range(LOOK_UPS):
            look_up()
        series.append((time.process_time() - began) / LOOK_UPS)
    return min(series)


def _keys(count: int) -> KeyStore:
    store = KeyStore(RecordedAudit())
    for number in range(count):
        name = f"key-{number}"
        entries = key_entries(key_of(number), expires="2090-01-01T00:00:00Z", concurrency="8")
        store.put(("keys", name), key_secret(name, entries))
    store.listed()
    return store


def _services(count: int) -> ServiceIndex:
    index = ServiceIndex()
    for number in range(count):
        index.put(("team", f"s-{number}"), {"spec": {"model": {"adapters": [{"name": "a"}]}}})
    return index


def test_many_keys_make_no_look_up_slower() -> None:
    began = time.process_time()
    many = _keys(KEYS)
    load_s = time.process_time() - began
    few, digest = _keys(10), bytes.fromhex(digest_of(key_of(7)))
    assert many.find(digest) is not None
    few_s, many_s = (_seconds_a_look_up(lambda s=s: s.find(digest)) for s in (few, many))  # type: ignore[misc]
    print(f"{KEYS} keys: {load_s:.2f} s to load, {many_s * 1e6:.2f} us a look-up")
    assert many_s < few_s * FACTOR


async def test_many_keys_are_listed_in_pages_and_a_change_is_one_event() -> None:
    async with ListWatchServer() as server:
        server.page = KEYS
        for number in range(KEYS):
            name = f"key-{number}"
            secret = key_secret(name, key_entries(key_of(number)))
            secret["metadata"]["resourceVersion"] = "1"
            server.objects[name] = secret
        audit = RecordedAudit()
        keys = WatchedKeys(KeysSettings(), server.credentials, audit)
        began, cpu_s = time.monotonic(), time.process_time()
        async with running(keys):
            await server.until(lambda: server.watches == 1)
            load_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
            print(f"{KEYS} keys: {load_s:.2f} s to list, {cpu_s:.2f} s of them on the processor")
            assert len(keys.store) == KEYS
            await server.remove("key-7")
            await until("the key ends", lambda: not keys.in_force("key-7", time.time()))
            assert server.lists == 1
            assert len(keys.store) == KEYS - 1
            assert audit.changes == [("key-7", "revoked", None)]


def test_many_services_make_no_look_up_slower() -> None:
    began = time.process_time()
    many = _services(SERVICES)
    load_s = time.process_time() - began
    assert len(many.serving("a")) == SERVICES
    few_s, many_s = (
        _seconds_a_look_up(lambda s=s: s.serving("s-7"))  # type: ignore[misc]
        for s in (_services(10), many)
    )
    print(f"{SERVICES} services: {load_s:.2f} s to load, {many_s * 1e6:.2f} us a look-up")
    assert many_s < few_s * FACTOR
