"""Requests of the batch process, on behalf of a key."""

from __future__ import annotations

import pytest

from fleetkeeper_contract.headers import TIER_HEADER
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.interfaces import LimitRefused
from tests.gateway.http.world import CHAT, KEY, World

TOKEN = f"Bearer batch.{KEY.id}.signed"


@pytest.mark.promise("batch-tokens")
@pytest.mark.parametrize("tier", [None, "realtime", "standard", "nonsense"])
async def test_a_request_on_behalf_of_a_key_is_in_tier_batch_whatever_it_says(
    world: World, tier: str | None
) -> None:
    headers = {"Authorization": TOKEN} | ({} if tier is None else {TIER_HEADER: tier})
    async with world.post(None, CHAT, **headers) as response:
        assert response.status == 200
    (received,) = world.upstream.received
    assert received.values(TIER_HEADER) == ["batch"]
    assert all(TOKEN not in value for _, value in received.headers)
    (admission,) = world.limiter.admissions
    assert (admission.demand.key, admission.demand.tier) == (KEY, Tier.BATCH)
    (grant,) = world.grants.signed
    assert (grant["key_id"], grant["tier"]) == (KEY.id, Tier.BATCH)
    (line,) = world.audit.requests
    assert (line["key_id"], line["tier"], line["outcome"]) == (KEY.id, "batch", "ok")


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer batch.nobody.signed",
        f"Bearer batch.{KEY.id}.forged",
        f"Basic batch.{KEY.id}.signed",
        f"Bearer batch.{KEY.id}.signed, Bearer x",
    ],
)
async def test_what_is_no_token_of_a_known_key_is_refused(world: World, authorization: str) -> None:
    assert await world.refused(Authorization=authorization) == (401, "invalid_api_key")
    assert world.upstream.received == []


@pytest.mark.promise("batch-tokens")
async def test_a_revoked_key_is_refused_and_named_in_the_audit_log(world: World) -> None:
    world.keys.revoked.add(KEY.id)
    assert await world.refused(Authorization=TOKEN) == (401, "invalid_api_key")
    assert world.upstream.received == []
    (line,) = world.audit.requests
    assert (line["key_id"], line["status"]) == (KEY.id, 401)


async def test_limits_of_the_key_hold(world: World) -> None:
    world.limiter.refusal = LimitRefused("requests", "later", 7, {})
    async with world.post(Authorization=TOKEN) as response:
        assert (response.status, response.headers["retry-after"]) == (429, "7")


async def test_models_can_be_listed_on_behalf_of_a_key(world: World) -> None:
    async with world.client.get(
        world.url("/v1/models"), headers={"Authorization": TOKEN}
    ) as response:
        assert [one["id"] for one in (await response.json())["data"]] == ["m"]
