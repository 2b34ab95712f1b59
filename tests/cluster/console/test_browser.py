"""The browser that other tests drive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.browser import browser_tab, ensure_chromium


@pytest.fixture
async def site() -> AsyncIterator[TestServer]:
    """A server with one page."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<title>second</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    server = TestServer(app)
    async with server:
        yield server


@pytest.mark.exhaustive
async def test_until_waits_for_the_page_that_a_navigation_brings(
    site: TestServer, tmp_path: Path
) -> None:
    """A navigation to another site ends the page in which the expression still runs."""
    ensure_chromium()
    async with browser_tab(tmp_path) as tab:
        running = "new Promise((done) => setTimeout(() => done(document.title === 'second'), 1000))"
        waiting = asyncio.create_task(tab.until(running))
        await tab.value("'asked after it, and answered'")
        await tab.open(str(site.make_url("/")))
        assert await waiting
