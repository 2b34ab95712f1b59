"""The console's page as a user goes through it, in a real browser."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.browser import Tab

CHARTS = "document.querySelectorAll('#charts svg').length"
TEXT = "document.querySelector({0!r}).innerText"


@dataclass(frozen=True)
class ConsolePage:
    """A tab with the console."""

    tab: Tab

    async def open_fleet(self, link: str, namespace: str, name: str) -> None:
        """Open the link, and wait for the row of a service."""
        await self.tab.open(link)
        await self.tab.until(f"document.getElementById('open {namespace}/{name}') !== null")

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
