"""Debian's Chromium without a window, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.async_api import ConsoleMessage, Page, async_playwright, expect

from fleetkeeper_local.common import packages

GUARD_MS = 120_000
"""For a browser on a machine with other load."""

expect.set_options(timeout=GUARD_MS)


def ensure_chromium() -> None:
    """Install the browser's Debian package if it is missing, or skip the test."""
    if packages.missing_packages(packages.BROWSER_PACKAGES) and (
        os.geteuid() != 0 or shutil.which("apt-get") is None
    ):
        pytest.skip("the package chromium is missing; installing it needs root on Debian")
    packages.ensure_packages(packages.BROWSER_PACKAGES)


@dataclass
class Tab:
    """A page of the browser, and the errors of its scripts and of the content security policy."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def note(self, message: ConsoleMessage) -> None:
        """Keep a warning or an error that the browser's console shows."""
        if message.type in ("error", "warning"):
            self.problems.append(message.text)


@asynccontextmanager
async def browser_tab(directory: Path) -> AsyncIterator[Tab]:
    """A browser with a home of its own in this folder, and its tab."""
    home: dict[str, str | float | bool] = {**os.environ, "HOME": str(directory)}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), env=home, timeout=GUARD_MS
        )
        async with browser:
            tab = Tab(await browser.new_page())
            tab.page.set_default_timeout(GUARD_MS)
            tab.page.on("console", tab.note)
            tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
            yield tab
