"""`fleetkeeper console` over a real service: the fleet, its decisions and its history, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from fleetkeeper.fleet.view import view_of
from fleetkeeper_local.demo.fleet import Fleet
from fleetkeeper_local.demo.installation import Installation
from fleetkeeper_local.node.node import Node
from tests.support.browser import browser_tab, ensure_chromium
from tests.support.console_page import check_console, console_process, printed_link
from tests.support.service_world import steady

LIGHT_PER_S: Final = 2.0

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
        link = await printed_link(process)
        async with browser_tab(tmp_path) as tab:
            await check_console(tab, link, fleet.namespace, fleet.name, words[-1:])
