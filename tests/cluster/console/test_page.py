"""The console's page in a real browser, with a recorded fleet instead of an API server.

`FLEETKEEPER_PICTURES=FOLDER` keeps pictures of every view; docs/img/console.png is one of them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Locator, expect

from fleetkeeper.commands.fleet.prometheus_history import PrometheusHistory
from fleetkeeper.console.history import History
from fleetkeeper.console.samples import Samples
from fleetkeeper.console.server import serving
from fleetkeeper.console.session import Session
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.console.browser import Tab, browser_tab, ensure_chromium
from tests.support.console.console_fleet import (
    CHAT_CHANGES,
    HOSTILE_MESSAGE,
    chat_key,
    fleet_at,
    samples_until,
)
from tests.support.console.console_history import prometheus_of_a_day
from tests.support.console.console_page import ConsolePage
from tests.support.guards import GUARD_S

SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
SIZES: Final = {"wide": (1440, 1000), "narrow": (320, 800)}
RULES: Final = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="session")
def chromium() -> None:
    """The browser, from a Debian package."""
    ensure_chromium()


@dataclass(frozen=True)
class Shown(ConsolePage):
    """The console in a tab."""

    tab: Tab
    samples: Samples

    def part(self, selector: str) -> Locator:
        """Return a part of the page."""
        return self.page.locator(selector)

    async def resize(self, size: tuple[int, int], scheme: Literal["light", "dark"]) -> None:
        """Set the size of the window and the color scheme."""
        await self.page.set_viewport_size({"width": size[0], "height": size[1]})
        await self.page.emulate_media(color_scheme=scheme)

    async def see(self, name: str) -> None:
        """Check that nothing overflows at any width, and keep pictures if they are asked for."""
        for scheme in SCHEMES:
            for size, pixels in SIZES.items():
                await self.resize(pixels, scheme)
                await self.page.wait_for_function(
                    "document.documentElement.scrollWidth <= innerWidth"
                )
                await self.keep(f"{name}-{size}-{scheme}.png", whole=True)
        await self.resize(SIZES["wide"], "light")

    async def keep(self, name: str, *, whole: bool = False) -> None:
        """Keep a picture of the window or of the whole page if pictures are asked for."""
        if folder := os.environ.get("FLEETKEEPER_PICTURES"):
            await self.page.screenshot(path=Path(folder) / name, full_page=whole)

    async def violations(self) -> list[str]:
        """Return what axe-core finds in the page as it is."""
        found = await Axe().run(
            self.page, options={"runOnly": RULES, "resultTypes": ["violations"]}
        )
        return [f"{rule['id']}: {rule['nodes']}" for rule in found.response["violations"]]


@asynccontextmanager
async def _opened(tmp_path: Path, history: History | None = None) -> AsyncIterator[Shown]:
    samples, session = samples_until(time.time()), Session()
    async with (
        serving(samples, session, history=history) as port,
        browser_tab(tmp_path) as tab,
    ):
        shown = Shown(tab.page, tab, samples)
        await shown.resize(SIZES["wide"], "light")
        await tab.page.goto(f"http://127.0.0.1:{port}{session.link}")
        await expect(shown.part("#rows tr")).to_have_count(8)
        yield shown


@pytest.fixture
async def page(chromium: None, tmp_path: Path) -> AsyncIterator[Shown]:
    """The page of a recorded fleet, opened by its link."""
    async with _opened(tmp_path) as page:
        yield page


@pytest.fixture
async def day(chromium: None, tmp_path: Path) -> AsyncIterator[Shown]:
    """The same page, with a day of history in a real Prometheus."""
    async with prometheus_of_a_day(tmp_path, time.time(), chat_key()) as url:
        history = History(PrometheusHistory(url, deadline_s=GUARD_S))
        async with _opened(tmp_path, history) as page:
            yield page


@pytest.mark.promise("console-texts")
async def test_the_fleet_is_sorted_filtered_and_keeps_its_data_when_the_api_is_away(
    page: Shown,
) -> None:
    names = page.part("#rows th")
    assert page.page.url.endswith("/"), "the token is not in the address"
    await expect(names).to_have_text(
        ["chat", "embed", "summarize", "code", "translate", "vision", "new", "rerank"]
    )
    await page.see("fleet")

    assert HOSTILE_MESSAGE in (await page.part("#rows").text_content() or "")
    await expect(page.page).to_have_title("Fleet – Fleetkeeper")
    await expect(page.part("#rows img, #rows script")).to_have_count(0)

    await page.part("#column-wait button").click()
    assert (await names.all_text_contents())[:2] == ["code", "vision"]
    await expect(page.part("#column-wait")).to_have_attribute("aria-sort", "descending")
    await page.part("#filter").fill("TEAM-B gpu")
    await expect(names).to_have_text(["code", "vision"])

    page.samples.fail("cannot list InferenceServices: 403 Forbidden", time.time())
    await expect(page.part("#notice")).to_contain_text("403 Forbidden")
    await expect(page.part("#fresh")).to_have_class("fresh old")
    await expect(names).to_have_text(["code", "vision"])
    await page.see("fleet-problem")
    page.samples.add(fleet_at(time.time(), time.time()), time.time())
    await expect(page.part("#notice")).to_be_empty()
    assert page.tab.problems == []

    await page.page.context.set_offline(True)
    await expect(page.part("#notice")).to_contain_text("Start the command")
    await expect(names).to_have_text(["code", "vision"])


@pytest.mark.exhaustive
async def test_a_service_shows_charts_decisions_and_replicas(page: Shown) -> None:
    await page.open_service("team-a", "chat")
    await expect(page.charts).to_have_count(6)
    await expect(page.part("#service-title")).to_be_focused()
    await expect(page.charts.first).to_have_attribute(
        "aria-label",
        re.compile(r"^Queue wait over the last 20 minutes\. Queue wait: now .*objective: 500 ms\."),
    )
    await expect(page.part("#changes")).to_contain_text("replicas 3 -> 5 (QueueWaitAboveTarget)")
    await expect(page.part("#replicas tbody tr")).to_have_count(5)
    await expect(page.part("#span")).to_have_text("Since the console started")
    await expect(page.part("#hint")).to_have_text(
        "For the last hours, start the console with --prometheus URL."
    )
    await expect(page.part("#ranges")).to_be_hidden()
    await page.see("service")

    await page.charts.first.hover()
    readout = page.part("#charts .readout").first
    await expect(readout).to_have_text(re.compile(r"^\d\d:\d\d\s+[\d.,]+ ms$"))

    line = page.part("#charts .line").first
    before = await line.get_attribute("d")
    assert before
    page.samples.add(fleet_at(time.time(), time.time()), time.time())
    await expect(line).not_to_have_attribute("d", before)

    await page.page.evaluate("location.hash = '#/team-b/vision'")
    await expect(page.part("#problems")).to_contain_text("InsufficientGPU")
    await page.see("service-problem")
    await page.page.evaluate("location.hash = '#/team-b/gone'")
    await expect(page.part("#gone")).to_contain_text("gone was not found")
    assert page.tab.problems == []


@pytest.mark.exhaustive
async def test_the_charts_show_the_last_hours_with_their_decisions(day: Shown) -> None:
    """From Prometheus, by the console alone: the page's policy lets the browser ask nobody else."""
    await day.open_service("team-a", "chat")
    await expect(day.part("#span")).to_have_text("Since the console started")
    await expect(day.marks).to_have_count(len(CHAT_CHANGES))

    await day.show_hours(24)
    await expect(day.part("#hint")).to_be_empty()
    for title, text in {
        "Queue wait": r"^Queue wait over the last 24 hours\. Queue wait: now \d",
        "Replicas": r"ready: now 5, lowest 2, highest 5\. wanted: now 5",
        "Limit of sequences": "lowest 64, highest 96",
        "Requests": r"refused: now [\d.]+ /s, lowest 0 /s, highest [\d.]*[1-9]",
    }.items():
        await expect(day.chart(title)).to_have_attribute("aria-label", re.compile(text))
    await expect(day.marks.nth(len(CHAT_CHANGES) + 10)).to_be_attached()
    limit = await day.part("#charts path.limit").first.get_attribute("d")
    assert "V" in (limit or ""), "the objective changed in the day"
    heads, *rows = await day.table()
    assert heads[:2] == ["Time", "Queue wait"]
    assert heads[-1] == "Decisions"
    assert 40 < len(rows) <= 61
    decisions = ", ".join(row[-1] for row in rows)
    assert "replicas 3 -> 5 (QueueWaitAboveTarget)" in decisions, "the last, from the status"
    assert decisions.count("limits") == 7, "six of the metrics, one of the status"
    await day.part("#data").evaluate("(details) => { details.open = false }")
    await day.see("history")
    await day.resize((1440, 1330), "light")
    await day.keep("console.png")

    await day.show_hours(1)
    await expect(day.chart("Queue wait")).to_have_attribute(
        "aria-label", re.compile(r"^Queue wait over the last 60 minutes\.")
    )
    await day.part("label[for=hours-0]").click()
    await expect(day.part("#span")).to_have_text("Since the console started")
    await expect(day.marks).to_have_count(len(CHAT_CHANGES))
    assert day.tab.problems == []


@pytest.mark.exhaustive
async def test_a_prometheus_that_is_away_is_named_and_asked_again(
    chromium: None, tmp_path: Path
) -> None:
    """The rest of the page stays as it is."""
    (port,) = free_ports(1)
    history = History(PrometheusHistory(f"http://127.0.0.1:{port}", deadline_s=2.0))
    async with _opened(tmp_path, history) as page:
        await page.open_service("team-a", "chat")
        await page.show_hours(6)
        await expect(page.part("#hint")).to_contain_text("Prometheus did not answer")
        await expect(page.part("#notice")).to_be_empty()
        await expect(page.part("#changes")).to_contain_text("replicas 3 -> 5")


@pytest.mark.exhaustive
async def test_every_control_is_reached_by_the_keyboard_and_no_rule_of_accessibility_is_broken(
    day: Shown,
) -> None:
    for scheme in SCHEMES:
        await day.resize(SIZES["wide"], scheme)
        assert await day.violations() == [], scheme
    await day.open_service("team-a", "chat")
    await day.show_hours(6)
    await day.table()
    for scheme in SCHEMES:
        for pixels in SIZES.values():
            await day.resize(pixels, scheme)
            assert await day.violations() == [], (scheme, pixels)

    names = await day.part("svg").evaluate_all(
        "(charts) => charts.map((chart) => chart.getAttribute('aria-label'))"
    )
    assert all(names)
    assert len(set(names)) == len(names) > 0
    wanted = await day.part('a, button, input, summary, [tabindex="0"]').evaluate_all(
        "(nodes) => nodes.filter((node) => node.checkVisibility() && !(node.type === 'radio' && !node.checked))"
        ".map((node) => node.id || node.tagName)"
    )
    reached = set[str]()
    await day.page.evaluate("document.activeElement.blur()")
    for _ in range(60):
        await day.page.keyboard.press("Tab")
        reached.add(
            await day.page.evaluate("document.activeElement.id || document.activeElement.tagName")
        )
    assert set(wanted) <= reached
    await day.part("#hours-6").focus()
    await day.page.keyboard.press("ArrowRight")
    await expect(day.part("#span")).to_have_text("The last 24 hours")
    await expect(day.part("#hours-24")).to_be_focused()
