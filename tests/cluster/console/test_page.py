"""The console's page in a real browser, with a recorded fleet instead of an API server.

`FLEETKEEPER_PICTURES=FOLDER` keeps pictures of every view; docs/img/console.png is one of them.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetkeeper.commands.fleet.prometheus_history import PrometheusHistory
from fleetkeeper.console.history import History
from fleetkeeper.console.samples import Samples
from fleetkeeper.console.server import serving
from fleetkeeper.console.session import Session
from fleetkeeper.fleet.view import view_of
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.axe import axe_script, violations
from tests.support.browser import Tab, browser_tab, ensure_chromium
from tests.support.console_fleet import (
    CHAT_CHANGES,
    HOSTILE_MESSAGE,
    chat_key,
    fleet_at,
    samples_until,
)
from tests.support.console_history import prometheus_of_a_day
from tests.support.console_page import ConsolePage, check_console, console_process, printed_link
from tests.support.crds import install_crds
from tests.support.operator_world import service

SIZES = {"wide": (1440, 1000), "narrow": (320, 800)}
GUARD_S = 120.0
NO_OVERFLOW = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="session")
def chromium() -> None:
    """The browser, from a Debian package."""
    ensure_chromium()


@dataclass
class Page:
    """The console in a tab."""

    tab: Tab
    samples: Samples
    link: str
    pictures: Path | None

    async def see(self, name: str) -> None:
        """Check that nothing overflows at any width, and keep pictures if they are asked for."""
        for scheme in ("light", "dark"):
            for size, (width, height) in SIZES.items():
                await self.tab.look(width, height, scheme=scheme)
                await self.tab.until(NO_OVERFLOW)
                whole = await self.tab.value("document.documentElement.scrollHeight")
                await self.tab.look(width, whole, scheme=scheme)
                await self.keep(f"{name}-{size}-{scheme}.png")
        await self.tab.look(*SIZES["wide"])

    async def keep(self, name: str) -> None:
        """Keep a picture if pictures are asked for."""
        if self.pictures is not None:
            await self.tab.picture(self.pictures / name)


@asynccontextmanager
async def _opened(tmp_path: Path, history: History | None = None) -> AsyncIterator[Page]:
    folder = os.environ.get("FLEETKEEPER_PICTURES")
    pictures = Path(folder) if folder else None
    samples, session = samples_until(time.time()), Session()
    async with (
        serving(samples, session, history=history) as port,
        browser_tab(tmp_path) as tab,
    ):
        await tab.look(*SIZES["wide"])
        link = f"http://127.0.0.1:{port}{session.link}"
        await tab.open(link)
        await tab.until("document.querySelectorAll('#rows tr').length === 8")
        yield Page(tab, samples, link, pictures)


@pytest.fixture
async def page(chromium: None, tmp_path: Path) -> AsyncIterator[Page]:
    """The page of a recorded fleet, opened by its link."""
    async with _opened(tmp_path) as page:
        yield page


@pytest.fixture
async def day(chromium: None, tmp_path: Path) -> AsyncIterator[Page]:
    """The same page, with a day of history in a real Prometheus."""
    async with prometheus_of_a_day(tmp_path, time.time(), chat_key()) as url:
        history = History(PrometheusHistory(url, deadline_s=GUARD_S))
        async with _opened(tmp_path, history) as page:
            yield page


@pytest.mark.promise("console-texts")
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
async def test_the_link_opens_once_and_the_page_stays_open_in_its_browser(page: Page) -> None:
    await page.tab.open(page.link)
    await page.tab.until("document.querySelectorAll('#rows tr').length === 8")
    await page.tab.call("Network.clearBrowserCookies")
    await page.tab.open(page.link)
    await page.tab.until("document.body.innerText.includes('start it again for a new link')")


@pytest.mark.exhaustive
async def test_without_prometheus_the_page_says_how_to_get_history(page: Page) -> None:
    await page.tab.value("document.getElementById('open team-a/chat').click()")
    await page.tab.until("document.querySelectorAll('#charts svg').length === 6")
    shown = ConsolePage(page.tab)
    assert await shown.text("#span") == "Since the console started"
    assert await shown.text("#hint") == (
        "For the last hours, start the console with --prometheus URL."
    )
    assert await page.tab.value("document.querySelector('#ranges').hidden") is True


@pytest.mark.exhaustive
async def test_the_charts_show_the_last_hours_with_their_decisions(day: Page) -> None:
    """From Prometheus, by the console alone: the page's policy lets the browser ask nobody else."""
    shown = ConsolePage(day.tab)
    await shown.open_service("team-a", "chat")
    assert await shown.text("#span") == "Since the console started"
    live = await shown.marks()
    assert live == len(CHAT_CHANGES)

    await shown.show_hours(24)
    assert await shown.text("#hint") == ""
    wait = await shown.chart("Queue wait")
    assert wait.startswith("Queue wait over the last 24 hours. Queue wait: now ")
    assert "no measurements" not in wait
    assert "ready: now 5, lowest 2, highest 5. wanted: now 5" in await shown.chart("Replicas")
    assert "lowest 64, highest 96" in await shown.chart("Limit of sequences")
    assert re.search(
        r"refused: now [\d.]+ /s, lowest 0 /s, highest [\d.]*[1-9]", await shown.chart("Requests")
    )
    assert await shown.marks() > live + 10
    limit = await day.tab.value("document.querySelector('#charts path.limit').getAttribute('d')")
    assert "V" in limit, "the objective changed in the day"
    heads, *rows = await shown.table()
    assert heads[:2] == ["Time", "Queue wait"]
    assert heads[-1] == "Decisions"
    assert 40 < len(rows) <= 61
    told = ", ".join(row[-1] for row in rows)
    assert "replicas 3 -> 5 (QueueWaitAboveTarget)" in told, "the status has the last ones in words"
    assert told.count("limits") == 7, "six of the metrics, one of the status"
    await day.tab.value("document.getElementById('data').open = false")
    await day.see("history")
    await day.tab.look(1440, 1330)
    await day.keep("console.png")

    await shown.show_hours(1)
    assert (await shown.chart("Queue wait")).startswith("Queue wait over the last 60 minutes.")
    await day.tab.value("document.getElementById('hours-0').click()")
    await day.tab.until("document.querySelector('#span').innerText === 'Since the console started'")
    assert await shown.marks() == live
    assert day.tab.problems == []


@pytest.mark.exhaustive
async def test_a_prometheus_that_is_away_is_named_and_asked_again(
    chromium: None, tmp_path: Path
) -> None:
    """The rest of the page stays as it is."""
    (port,) = free_ports(1)
    history = History(PrometheusHistory(f"http://127.0.0.1:{port}", deadline_s=2.0))
    async with _opened(tmp_path, history) as page:
        shown = ConsolePage(page.tab)
        await shown.open_service("team-a", "chat")
        await page.tab.value("document.getElementById('hours-6').click()")
        await page.tab.until(
            "document.querySelector('#hint').innerText.includes('Prometheus did not answer')"
        )
        assert await page.tab.value("document.querySelector('#notice').textContent") == ""
        assert "replicas 3 -> 5" in await shown.text("#changes")


@pytest.mark.exhaustive
async def test_every_control_is_reached_by_the_keyboard_and_no_rule_of_accessibility_is_broken(
    day: Page,
) -> None:
    script = axe_script()
    if script is None:
        pytest.skip("npm is missing; it fetches axe-core")
    shown = ConsolePage(day.tab)
    for scheme in ("light", "dark"):
        await day.tab.look(*SIZES["wide"], scheme=scheme)
        assert await violations(day.tab, script) == [], scheme
    await shown.open_service("team-a", "chat")
    await shown.show_hours(6)
    await shown.table()
    for scheme in ("light", "dark"):
        for size in SIZES.values():
            await day.tab.look(*size, scheme=scheme)
            assert await violations(day.tab, script) == [], (scheme, size)

    names = await day.tab.value(
        "[...document.querySelectorAll('svg')].map((chart) => chart.getAttribute('aria-label'))"
    )
    assert all(names)
    assert len(set(names)) == len(names)
    reached = set[str]()
    await day.tab.value("document.activeElement.blur()")
    for _ in range(60):
        await day.tab.press("Tab")
        reached.add(
            await day.tab.value("document.activeElement.id || document.activeElement.tagName")
        )
    wanted = "[...document.querySelectorAll('a, button, input, summary, [tabindex=\"0\"]')].filter((node) => node.checkVisibility() && !(node.type === 'radio' && !node.checked)).map((node) => node.id || node.tagName)"
    assert set(await day.tab.value(wanted)) <= reached
    await day.tab.value("document.getElementById('hours-6').focus()")
    await day.tab.press("ArrowRight")
    await day.tab.until("document.querySelector('#span').innerText === 'The last 24 hours'")
    assert await day.tab.value("document.activeElement.id") == "hours-24"


@pytest.mark.promise("console-rights")
@pytest.mark.exhaustive
async def test_the_command_shows_a_service_of_the_cluster_with_its_history(
    chromium: None, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """As tests/e2e does on a node, but with a service that nobody runs."""
    now, namespace = time.time(), f"console-{uuid.uuid4().hex[:6]}"
    install_crds(control_plane)
    control_plane.kubectl("create", "namespace", namespace)
    inside = ("-n", namespace)
    control_plane.kubectl(*inside, "create", "-f", "-", input=json.dumps(service()))
    (chat,) = [item for item in fleet_at(now, now).services if item["metadata"]["name"] == "chat"]
    status = json.dumps({"status": chat["status"]})
    patch = ("patch", "fis", "chat", "--subresource=status", "--type=merge", "-p", status)
    control_plane.kubectl(*inside, *patch)
    options = ("-n", namespace, "--interval", "1", "--prometheus")
    key = (namespace, "chat")
    async with prometheus_of_a_day(tmp_path, now, key) as url, browser_tab(tmp_path) as tab:
        with console_process(control_plane.kubeconfig, *options, url) as process:
            link = await printed_link(process)
            words = [change.in_words() for change in view_of(chat, {}).changes]
            assert len(words) == len(CHAT_CHANGES)
            await check_console(tab, link, *key, words)
            assert await ConsolePage(tab).marks() >= len(words)
    control_plane.kubectl("delete", "namespace", namespace, "--wait=false")
