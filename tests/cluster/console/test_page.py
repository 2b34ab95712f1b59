"""The console's page in a real browser, with a recorded fleet instead of an API server.

`FLEETKEEPER_PICTURES=FOLDER` keeps pictures of every view; docs/img/console.png is one of them.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetkeeper.console.samples import Samples
from fleetkeeper.console.server import serving
from fleetkeeper.console.session import Session
from fleetkeeper_local.common import packages
from tests.support.browser import Tab, browser_tab
from tests.support.console_fleet import HOSTILE_MESSAGE, fleet_at, samples_until

SIZES = {"wide": (1440, 1000), "narrow": (320, 800)}
NO_OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="session")
def chromium() -> None:
    """The browser, from a Debian package."""
    if packages.missing_packages(packages.BROWSER_PACKAGES) and (
        os.geteuid() != 0 or shutil.which("apt-get") is None
    ):
        pytest.skip("the package chromium is missing; installing it needs root on Debian")
    packages.ensure_packages(packages.BROWSER_PACKAGES)


@dataclass
class Page:
    """The console in a tab."""

    tab: Tab
    samples: Samples
    link: str
    pictures: Path

    async def see(self, name: str) -> None:
        """Check that nothing overflows at any width, and keep pictures."""
        for scheme in ("light", "dark"):
            for size, (width, height) in SIZES.items():
                await self.tab.look(width, height, scheme=scheme)
                await self.tab.until(NO_OVERFLOW)
                whole = await self.tab.value("document.documentElement.scrollHeight")
                await self.tab.look(width, whole, scheme=scheme)
                await self.tab.picture(self.pictures / f"{name}-{size}-{scheme}.png")
        await self.tab.look(*SIZES["wide"])


@pytest.fixture
async def page(chromium: None, tmp_path: Path) -> AsyncIterator[Page]:
    """The page of a recorded fleet, opened by its link."""
    pictures = Path(os.environ.get("FLEETKEEPER_PICTURES", tmp_path / "pictures"))
    samples, session = samples_until(time.time()), Session()
    async with serving(samples, session) as port, browser_tab(tmp_path) as tab:
        await tab.look(*SIZES["wide"])
        link = f"http://127.0.0.1:{port}{session.link}"
        await tab.open(link)
        await tab.until("document.querySelectorAll('#rows tr').length === 8")
        yield Page(tab, samples, link, pictures)


async def test_the_fleet_is_sorted_filtered_and_keeps_its_data_when_the_api_is_away(
    page: Page,
) -> None:
    tab = page.tab
    names = "[...document.querySelectorAll('#rows th')].map((cell) => cell.textContent).join()"
    assert (await tab.value("location.href")).endswith("/"), "the token is not in the address"
    assert await tab.value(names) == "chat,embed,summarize,code,translate,vision,new,rerank"
    await page.see("fleet")

    assert HOSTILE_MESSAGE in await tab.value("document.querySelector('#rows').textContent")
    assert await tab.value("document.title") == "Fleet – Fleetkeeper"
    assert await tab.value("document.querySelectorAll('#rows img, #rows script').length") == 0

    await tab.value("document.querySelector('#column-wait button').click()")
    assert (await tab.value(names)).startswith("code,vision,")
    assert await tab.value("document.querySelector('#column-wait').ariaSort") == "descending"
    await tab.value("document.querySelector('#filter').value = 'TEAM-B gpu'")
    await tab.value("document.querySelector('#filter').dispatchEvent(new Event('input'))")
    assert await tab.value(names) == "code,vision"

    page.samples.fail("cannot list InferenceServices: 403 Forbidden", time.time())
    await tab.until("document.querySelector('#notice').textContent.includes('403 Forbidden')")
    assert await tab.value("document.querySelector('#fresh').className") == "fresh old"
    assert await tab.value(names) == "code,vision"
    await page.see("fleet-problem")
    page.samples.add(fleet_at(time.time(), time.time()), time.time())
    await tab.until("document.querySelector('#notice').textContent === ''")
    assert tab.problems == []

    offline = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    await tab.call("Network.enable")
    await tab.call("Network.emulateNetworkConditions", offline=True, **offline)
    await tab.until("document.querySelector('#notice').textContent.includes('Start the command')")
    assert await tab.value(names) == "code,vision"


async def test_a_service_shows_charts_decisions_and_replicas(page: Page) -> None:
    tab = page.tab
    await tab.value("document.getElementById('open team-a/chat').click()")
    await tab.until("document.querySelectorAll('#charts svg').length === 6")
    assert await tab.value("document.activeElement.id") == "service-title"
    label = await tab.value("document.querySelector('#charts svg').getAttribute('aria-label')")
    assert label.startswith("Queue wait over the last 20 minutes. Queue wait: now ")
    assert "objective: 500 ms." in label
    changes = await tab.value("document.querySelector('#changes').innerText")
    assert "replicas 3 -> 5 (QueueWaitAboveTarget)" in changes
    assert await tab.value("document.querySelectorAll('#replicas tbody tr').length") == 5
    await page.see("service")
    await tab.look(1440, 1052)
    await tab.picture(page.pictures / "console.png")

    chart = await tab.value(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('#charts svg').getBoundingClientRect())"
    )
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=chart[0], y=chart[1])
    readout = await tab.until("document.querySelector('#charts .readout').textContent")
    assert re.fullmatch(r"\d\d:\d\d  [\d.,]+ ms", readout)

    points = "document.querySelector('#charts .line').getAttribute('d')"
    before = await tab.value(points)
    page.samples.add(fleet_at(time.time(), time.time()), time.time())
    await tab.until(f"{points} !== {before!r}")

    await tab.value("location.hash = '#/team-b/vision'")
    await tab.until("document.querySelector('#problems').innerText.includes('InsufficientGPU')")
    await page.see("service-problem")
    await tab.value("location.hash = '#/team-b/gone'")
    await tab.until("document.querySelector('#gone').innerText.includes('gone was not found')")
    assert tab.problems == []


async def test_the_link_opens_once_and_the_page_stays_open_in_its_browser(page: Page) -> None:
    await page.tab.open(page.link)
    await page.tab.until("document.querySelectorAll('#rows tr').length === 8")
    await page.tab.call("Network.clearBrowserCookies")
    await page.tab.open(page.link)
    await page.tab.until("document.body.innerText.includes('start it again for a new link')")
