"""The engines' control port from the operator's side: signed, bounded, never trusted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper.adapters.engine import (
    EngineError,
    Engines,
    Signer,
    address_of,
    limits_body,
)
from fleetkeeper.adapters.keys import public_jwk
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import Source
from fleetkeeper.autoscale.signals.series_map import PLACES, SHOWN
from fleetkeeper.autoscale.types import Admission, Limits, LimitsRequest, PodView
from fleetkeeper_contract.step_terms import StepSums
from fleetkeeper_engine.spec import Batching
from fleetkeeper_engine.supervisor.control_api.auth import Verifier, parse_keys
from fleetkeeper_engine.supervisor.limits_requests import allowed_ranges, parse_limits_request
from tests.support.autoscale.control_cases import NOW, sample
from tests.support.autoscale.engine_metrics import metrics_text, parse_sample

ROOT = Path(__file__).parents[3]
EDGES = Edges(0.5, 0.05)
KEY = Ed25519PrivateKey.generate()
ORDER = LimitsRequest(
    "chat-0", "uid-0", "127.0.0.1", Limits(64, 2048), Admission((1.0, 0.6, 0.05), 0.05), 120.0, 17
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def put(handler: Handler, order: LimitsRequest = ORDER, *, may_send: bool = True) -> Any:
    """One order to a port with this handler."""
    async with serving(handler, may_send=may_send) as engines:
        return (await engines.put_limits([order]))[0]


class serving:  # noqa: N801 - reads as a verb
    """A loopback control port with one handler for everything, and the adapter that calls it."""

    def __init__(self, handler: Handler, *, may_send: bool = True) -> None:
        self._handler = handler
        self._signer = Signer(KEY, epoch=lambda: 3, may_sign=lambda: may_send)

    async def __aenter__(self) -> Engines:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handler)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self._engines = Engines(lambda: NOW, self._signer, port=port)
        return self._engines

    async def __aexit__(self, *_: object) -> None:
        await self._engines.close()
        await self._runner.cleanup()


@pytest.mark.promise("signed-limits")
async def test_an_order_is_signed_as_the_engine_demands() -> None:
    """The engine's own verifier takes the token once, for this pod only."""
    seen: list[tuple[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"accepted": 17, "applied": 17})

    assert (await put(handler)).succeeded
    token, body = seen[0]
    verifier = Verifier("uid-0", "fleetkeeper")
    verifier.trust(parse_keys(json.dumps({"keys": [public_jwk(KEY.public_key())]})))
    assert verifier.verify(token, NOW).epoch == 3
    claims = jwt.decode(token.split()[1], options={"verify_signature": False})
    assert claims["exp"] - claims["iat"] <= 60
    with pytest.raises(Exception, match="used before"):
        verifier.verify(token, NOW)
    other = Verifier("uid-1", "fleetkeeper")
    other.trust(parse_keys(json.dumps({"keys": [public_jwk(KEY.public_key())]})))
    with pytest.raises(Exception, match="not valid"):
        other.verify(token, NOW)
    assert body == limits_body(ORDER)


def test_the_body_is_what_the_engine_parses() -> None:
    """Held by both sides of the contract."""
    order = parse_limits_request(
        json.dumps(limits_body(ORDER)).encode(), allowed_ranges(Batching())
    )
    assert (order.sequences, order.tokens, order.generation, order.lease_seconds) == (
        64,
        2048,
        17,
        120,
    )
    assert order.admit.standard == 0.6
    assert order.shares.batch == 0.05


@pytest.mark.parametrize(
    ("status", "body", "newest"),
    [
        (409, {"error": "old", "generation": 99}, 99),
        (409, {"generation": "x"}, 0),
        (409, {"generation": -1}, 0),
        (409, {"generation": True}, 0),
        (409, {"generation": 2**60}, 0),
        (422, {"error": "outside", "generation": 5}, 0),
        (401, {}, 0),
        (500, {}, 0),
        (302, {}, 0),
    ],
)
async def test_other_answers_are_failures_with_their_detail(
    status: int, body: dict[str, Any], newest: int
) -> None:
    """Only a 409 names a newer generation, and only a sensible one."""

    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body, status=status, headers={"Location": "http://127.0.0.1:1/"})

    outcome = await put(handler)
    assert not outcome.succeeded
    assert outcome.newest_generation == newest
    assert str(status) in outcome.detail


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"7", b"\xff\xfe", b'{"a":'])
async def test_garbage_is_a_failure(body: bytes) -> None:
    """Also with status 200."""

    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=body)

    assert not (await put(handler)).succeeded


@pytest.mark.promise("bounded-numbers")
async def test_a_large_answer_is_cut_off() -> None:
    """4 MiB at most."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for _ in range(200):
                await response.write(b"x" * 65_536)
        except ConnectionError:
            return response
        return response

    outcome = await put(handler)
    assert not outcome.succeeded
    assert "larger" in outcome.detail


@pytest.mark.promise("bounded-numbers")
@pytest.mark.slow
async def test_a_silent_engine_costs_two_seconds() -> None:
    """And is a failure."""

    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    began = asyncio.get_running_loop().time()
    outcome = await put(handler)
    assert not outcome.succeeded
    assert asyncio.get_running_loop().time() - began < 10


async def test_at_most_sixty_four_calls_are_under_way() -> None:
    """However many pods there are."""
    under_way = most = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return web.json_response({})

    async with serving(handler) as engines:
        outcomes = await engines.put_limits([ORDER] * 200)
    assert all(outcome.succeeded for outcome in outcomes)
    assert 16 < most <= 64


@pytest.mark.promise("one-leader")
async def test_who_lost_the_lease_sends_nothing() -> None:
    """Asked just before each order."""
    calls = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.json_response({})

    assert not (await put(handler, may_send=False)).succeeded
    assert calls == 0


@pytest.mark.promise("no-addresses")
@pytest.mark.parametrize(
    "ip", ["", "localhost", "metadata.internal", "10.0.0.1/x", "10.0.0.1:80", "[::1]", "1.2.3"]
)
def test_only_ip_addresses_are_called(ip: str) -> None:
    """Never a name, a path or a port that came from elsewhere."""
    with pytest.raises(EngineError):
        address_of(ip, "/metrics", 9090)


def test_ipv6_addresses_stand_in_brackets() -> None:
    """As URLs demand."""
    assert address_of("fd00::1", "/metrics", 9090) == "http://[fd00::1]:9090/metrics"


POD = PodView("chat-0", "uid-0", NOW - 600, True, NOW - 500, ip="127.0.0.1")


@pytest.mark.promise("without-prometheus")
@pytest.mark.parametrize("flag", [0.0, 1.0])
async def test_a_direct_scrape_gives_the_same_record(flag: float) -> None:
    """What the pod exposed is what comes out, marked as direct. Flags of older engines are 1."""
    gauges = sample(NOW).gauges._replace(live_limits=flag, memory_own=flag, idle_s=901.5)
    held = sample(NOW, gauges=gauges)

    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=metrics_text(held, EDGES))

    async with serving(handler) as engines:
        got = await engines.scrape_samples([(POD, EDGES)])
    assert set(got) == {POD.uid}
    found = got[POD.uid]
    assert found is not None
    assert found.counters == pytest.approx(held.counters)
    assert found.gauges == pytest.approx(held.gauges)
    assert found.source is Source.DIRECT
    assert found.missing == ()
    assert found.decode == StepSums()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "nonsense\n",
        "fleetkeeper_steps_total abc\n",
        "fleetkeeper_steps_total{ 1\n",
        "<html></html>",
        "fleetkeeper_steps_total 1e999999 NaN x\n",
    ],
)
async def test_pods_without_usable_metrics_are_left_out(body: str) -> None:
    """One bad pod aborts nothing."""

    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=body)

    async with serving(handler) as engines:
        assert await engines.scrape_samples([(POD, EDGES)]) == {POD.uid: None}


@pytest.mark.parametrize(
    "name", sorted({name for name, _ in PLACES if not name.startswith("fleetkeeper_step_model")})
)
def test_a_missing_metric_is_named(name: str) -> None:
    """If decisions need it."""
    text = "".join(
        line + "\n"
        for line in metrics_text(sample(NOW), EDGES).splitlines()
        if not line.startswith(name)
    )
    got = parse_sample("chat-0", NOW, text.encode(), EDGES)
    assert got is not None
    optional = name in {
        "fleetkeeper_memory_used_ratio",
        "fleetkeeper_memory_peak_ratio",
        "fleetkeeper_memory_own",
        "fleetkeeper_memory_fragmentation_ratio",
        "fleetkeeper_live_limits_supported",
        "fleetkeeper_hung",
        "fleetkeeper_grants_demanded",
        "fleetkeeper_idle_seconds",
        *SHOWN,
    }
    assert (name in got.missing) is not optional


def test_the_table_is_the_engines_contract() -> None:
    """Every series and label value we read is one that engines export."""
    table = json.loads((ROOT / "engine_image/schemas/metrics.json").read_text())
    exported: dict[str, set[str]] = {}
    for row in table["metrics"]:
        values = {value for held in (row.get("values") or {}).values() for value in held} or {""}
        names = [row["name"]]
        if row["type"] == "histogram":
            names = [f"{row['name']}_{suffix}" for suffix in ("count", "sum", "bucket")]
        for name in names:
            exported[name] = values
    for name, value in PLACES:
        assert name in exported, name
        assert value in exported[name], (name, value)


@pytest.fixture(autouse=True)
async def _no_task_is_left() -> AsyncIterator[None]:
    yield
    assert len(asyncio.all_tasks()) <= 2
