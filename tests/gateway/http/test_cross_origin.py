"""Scripts in a browser: preflights without a key, and answers that an allowed origin may read."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pydantic import ValidationError

from tests.gateway.http.world import AUTHORIZATION, CHAT, World, chat, settings

ORIGIN = "https://chat.example.com"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture
async def open_world(idle_world: World) -> AsyncIterator[World]:
    """A gateway that allows two origins."""
    async with idle_world.running(allowed_origins=f"http://localhost:3000, {ORIGIN}") as world:
        yield world


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
async def test_a_preflight_of_an_allowed_origin_needs_no_key(open_world: World, path: str) -> None:
    async with open_world.client.options(open_world.url(path), headers=PREFLIGHT) as response:
        assert (response.status, await response.read()) == (204, b"")
        headers = response.headers
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert headers["Vary"] == "Origin"
        assert headers["Access-Control-Allow-Methods"] == "GET, POST"
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "Access-Control-Allow-Credentials" not in headers
    assert open_world.audit.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {**PREFLIGHT, "Origin": "https://evil.example.com"},
        {**PREFLIGHT, "Origin": ORIGIN + ".evil.example.com"},
        {**PREFLIGHT, "Origin": "null"},
        {"Origin": ORIGIN},
        {"Access-Control-Request-Method": "POST"},
    ],
)
async def test_another_preflight_is_a_request_without_a_key(
    open_world: World, headers: dict[str, str]
) -> None:
    async with open_world.client.options(open_world.url(CHAT), headers=headers) as response:
        assert response.status == 401
        allowed = response.headers.get("Access-Control-Allow-Origin")
        assert allowed == (ORIGIN if headers.get("Origin") == ORIGIN else None)


async def test_answers_and_refusals_can_be_read_by_an_allowed_origin(open_world: World) -> None:
    for key, status in ((AUTHORIZATION, 200), ("Bearer wrong", 401)):
        async with open_world.post(chat(), Authorization=key, Origin=ORIGIN) as response:
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
    async with open_world.post(chat(), Origin="https://evil.example.com") as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_without_the_setting_no_origin_is_allowed(world: World) -> None:
    async with world.client.options(world.url(CHAT), headers=PREFLIGHT) as response:
        assert response.status == 401
        assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "chat.example.com", "https://x/", "https://x/path", "HTTPS://x", "https://a b"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="as browsers send it"):
        settings(allowed_origins=origin)
