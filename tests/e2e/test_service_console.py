"""`fleetkeeper console` over a real service: the fleet, its decisions and its history, in a browser."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from playwright.async_api import expect

from fleetkeeper.fleet.view import view_of
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.installation import Installation
from fleetkeeper_local.node.node import Node
from tests.support.console.browser import Tab, browser_tab, ensure_chromium
from tests.support.console.console_page import ConsolePage, console_process
from tests.support.node.service_world import steady

LIGHT_PER_S: Final = 2.0
HISTORY = ("Queue wait", "Batch time", "Requests", "Replicas", "Limit of sequences")
"""Charts that have data as soon as a service has had requests."""

pytestmark = pytest.mark.simulated


@pytest.fixture
def chromium() -> None:
    """The browser, from a Debian package."""
    ensure_chromium()


@pytest.mark.promise("console-rights")
async def test_the_console_shows_a_real_service_and_its_last_hour(
    chromium: None, node: Node, product: Installation, fleet: Fleet, tmp_path: Path
) -> None:
    """With the rights of a kubeconfig, and the node's Prometheus asked by the command alone."""
    words = [change.in_words() for change in view_of(fleet.live(), {}).changes]
    options = ("-n", fleet.namespace, "--operator-namespace", product.namespace, "--interval", "1")
    with (
        steady(fleet, LIGHT_PER_S, seed=13),
        console_process(node.kubeconfig, *options, "--prometheus", node.prometheus_url) as process,
    ):
        link = await _printed_link(process)
        async with browser_tab(tmp_path) as tab:
            await _check_console(tab, link, fleet.namespace, fleet.name, words[-1:])


async def _printed_link(process: subprocess.Popen[str]) -> str:
    """The link that the command prints in its second line."""
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def _check_console(
    tab: Tab, link: str, namespace: str, name: str, decisions: Sequence[str]
) -> None:
    """Go through the page: the fleet, a service with these decisions, and its last hour."""
    page, shown = tab.page, ConsolePage(tab.page)
    await page.goto(link)
    row = page.locator("#rows tr").filter(has=shown.link_of(namespace, name))
    await expect(row).to_contain_text(re.compile(r"\d+ / \d+ / \d+"))
    await shown.open_service(namespace, name)
    await expect(page.locator("#service-title")).to_have_text(name)
    await expect(page.locator("#state")).to_contain_text("Replicas: ")
    for words in decisions:
        await expect(page.locator("#changes")).to_contain_text(words)
    await shown.show_hours(1)
    for title in HISTORY:
        await expect(shown.chart(title)).not_to_have_attribute(
            "aria-label", re.compile("no measurements")
        )
    heads, *rows = await shown.table()
    assert (heads[0], heads[-1]) == ("Time", "Decisions")
    assert any(cell.endswith(" ms") for row in rows for cell in row)
    assert tab.problems == []
