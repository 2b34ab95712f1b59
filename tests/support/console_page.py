"""`fleetkeeper console` as a process, and its page as a user goes through it in a real browser."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.browser import Tab

HISTORY = ("Queue wait", "Batch time", "Requests", "Replicas", "Limit of sequences")
"""Charts that have data as soon as a service has had requests."""
CHARTS = "document.querySelectorAll('#charts svg').length"
TEXT = "document.querySelector({0!r}).innerText"


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


async def printed_link(process: subprocess.Popen[str]) -> str:
    """The link that the command prints in its second line."""
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def check_console(
    tab: Tab, link: str, namespace: str, name: str, decisions: Sequence[str]
) -> None:
    """Go through the page: the fleet, a service with these decisions, and its last hour."""
    page = ConsolePage(tab)
    await page.open_fleet(link, namespace, name)
    row = await page.row(namespace, name)
    assert re.search(r"\d+ / \d+ / \d+", row), row
    await page.open_service(namespace, name)
    assert await page.text("#service-title") == name
    assert "Replicas: " in await page.text("#state")
    for words in decisions:
        await tab.until(f"{TEXT.format('#changes')}.includes({words!r})")
    await page.show_hours(1)
    assert await page.text("#span") == "The last 1 hour"
    for title in HISTORY:
        await page.await_data(title)
    heads, *rows = await page.table()
    assert (heads[0], heads[-1]) == ("Time", "Decisions")
    assert any(cell.endswith(" ms") for row in rows for cell in row)
    assert tab.problems == []


@dataclass(frozen=True)
class ConsolePage:
    """A tab with the console."""

    tab: Tab

    async def open_fleet(self, link: str, namespace: str, name: str) -> None:
        """Open the link, and wait for the row of a service."""
        await self.tab.open(link)
        await self.tab.until(f"document.getElementById('open {namespace}/{name}') !== null")

    async def row(self, namespace: str, name: str) -> str:
        """Return the text of a service's row."""
        row = f"document.getElementById('open {namespace}/{name}').closest('tr')"
        return str(await self.tab.value(f"{row}.innerText"))

    async def open_service(self, namespace: str, name: str) -> None:
        """Follow the link of a service, and wait for its charts."""
        await self.tab.value(f"document.getElementById('open {namespace}/{name}').click()")
        await self.tab.until(f"{CHARTS} >= 5")

    async def show_hours(self, hours: int) -> None:
        """Choose a range, and wait for its charts."""
        await self.tab.value(f"document.getElementById('hours-{hours}').click()")
        words = "1 hour" if hours == 1 else f"{hours} hours"
        await self.tab.until(f"{TEXT.format('#span')} === 'The last {words}'")
        await self.tab.until("past.document !== null || past.problem")
        await self.tab.until(f"{CHARTS} >= 6 || {TEXT.format('#hint')}")

    async def chart(self, title: str) -> str:
        """Return the accessible text of a chart."""
        label = f"document.querySelector('#charts svg[aria-label^=\"{title} over\"]')"
        await self.tab.until(f"{label} !== null")
        return str(await self.tab.value(f"{label}.getAttribute('aria-label')"))

    async def await_data(self, title: str) -> None:
        """Wait until a chart has measurements: the page asks for them again and again."""
        found = f"document.querySelector('#charts svg[aria-label^=\"{title} over\"]')"
        label = f"({found}?.getAttribute('aria-label') ?? 'no measurements')"
        await self.tab.until(f"!{label}.includes('no measurements')")

    async def marks(self) -> int:
        """Return the number of decisions that are marked in the first chart."""
        return int(
            await self.tab.value(
                "document.querySelector('#charts svg').querySelectorAll('.mark').length"
            )
        )

    async def table(self) -> list[list[str]]:
        """Open the table of the charts, and return its cells."""
        await self.tab.value("document.getElementById('data').open = true")
        await self.tab.until("document.querySelectorAll('#table tbody tr').length > 0")
        rows = "[...document.querySelectorAll('#table tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
        found: list[list[str]] = await self.tab.value(rows)
        return found

    async def text(self, selector: str) -> str:
        """Return the visible text of a part of the page."""
        return str(await self.tab.value(TEXT.format(selector)))
