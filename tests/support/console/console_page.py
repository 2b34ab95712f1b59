"""`fleetkeeper console` as a process, and its page as a user goes through it in a real browser."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.async_api import Locator, Page, expect


@contextmanager
def console_process(kubeconfig: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command, for as long as the context lasts."""
    process = subprocess.Popen(
        # A shell's background job ignores SIGINT, and so would its children.
        ["env", "--default-signal=INT", sys.executable, "-m", "fleetkeeper", "console", *options],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class ConsolePage:
    """The parts of the console's page."""

    page: Page

    @property
    def charts(self) -> Locator:
        """The charts of a service."""
        return self.page.locator("#charts svg")

    @property
    def marks(self) -> Locator:
        """The decisions that are marked in the first chart."""
        return self.charts.first.locator(".mark")

    def chart(self, title: str) -> Locator:
        """Return the chart of this title."""
        return self.page.locator(f'#charts svg[aria-label^="{title} over"]')

    def link_of(self, namespace: str, name: str) -> Locator:
        """Return the link to a service."""
        return self.page.locator(f'[id="open {namespace}/{name}"]')

    async def open_service(self, namespace: str, name: str) -> None:
        """Follow the link of a service, and wait for its charts."""
        await self.link_of(namespace, name).click()
        await expect(self.charts.nth(4)).to_be_visible()

    async def show_hours(self, hours: int) -> None:
        """Choose a range, and wait for its charts."""
        await self.page.locator(f"label[for=hours-{hours}]").click()
        words = "1 hour" if hours == 1 else f"{hours} hours"
        await expect(self.page.locator("#span")).to_have_text(f"The last {words}")
        await expect(self.page.locator("#hint")).not_to_have_text("Prometheus is being asked.")

    async def table(self) -> list[list[str]]:
        """Open the table of the charts, and return its cells."""
        await self.page.locator("#data").evaluate("(details) => { details.open = true }")
        await expect(self.page.locator("#table tbody tr").first).to_be_attached()
        found: list[list[str]] = await self.page.locator("#table tr").evaluate_all(
            "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        return found
