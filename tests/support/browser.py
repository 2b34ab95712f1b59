"""A Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fleetkeeper_local.common import packages

NAVIGATED = "Inspected target navigated or closed"
"""What the protocol answers if a navigation ends the page that an expression runs in."""
GUARD_S = 120.0
"""For a browser that starts on a machine with other load."""
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # root has no other way; the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def ensure_chromium() -> None:
    """Install the browser's Debian package if it is missing, or skip the test."""
    if packages.missing_packages(packages.BROWSER_PACKAGES) and (
        os.geteuid() != 0 or shutil.which("apt-get") is None
    ):
        pytest.skip("the package chromium is missing; installing it needs root on Debian")
    packages.ensure_packages(packages.BROWSER_PACKAGES)


class ProtocolError(AssertionError):
    """The browser refused a call. `message` is its reason."""

    def __init__(self, method: str, error: dict[str, Any]) -> None:
        super().__init__(f"{method}: {error}")
        self.message = str(error.get("message", ""))


class Tab:
    """A tab. `problems` holds errors of scripts and of the content security policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []

    async def receive(self) -> None:
        """Hand out what the browser sends, until it ends."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(found["params"]["exceptionDetails"]))
            elif found["method"] == "Log.entryAdded":
                self.problems.append(json.dumps(found["params"]["entry"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        found = await asyncio.wait_for(answer, GUARD_S)
        if "error" in found:
            raise ProtocolError(method, found["error"])
        return dict(found["result"])

    async def value(self, expression: str) -> Any:
        """Return the value of an expression, after a promise."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value.

        A page that a navigation ends meanwhile counts as not there yet.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + GUARD_S
        while not (value := await self._value_unless_navigated(expression)):
            assert loop.time() < end, (
                f"never true: {expression}: {await self.value('document.body.innerText')}"
            )
            await asyncio.sleep(0.1)
        return value

    async def _value_unless_navigated(self, expression: str) -> Any:
        try:
            return await self.value(expression)
        except ProtocolError as error:
            if error.message != NAVIGATED:
                raise
            return None

    async def open(self, url: str) -> None:
        """Go to a page."""
        await self.call("Page.navigate", url=url)

    async def look(self, width: int, height: int, *, scheme: str = "light") -> None:
        """Set the size of the window and the color scheme."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)  # fmt: skip
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])  # fmt: skip

    async def press(self, key: str) -> None:
        """Press and release a key that has no character, such as Tab."""
        codes = {"Tab": 9, "ArrowRight": 39}
        for event in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=event, key=key, code=key, windowsVirtualKeyCode=codes[key])  # fmt: skip

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        _write(path, base64.b64decode(found["data"]))


@asynccontextmanager
async def browser_tab(directory: Path) -> AsyncIterator[Tab]:
    """A browser with a profile of its own in this folder, and its tab."""
    profile = directory / "profile"
    with (directory / "chromium.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "chromium", *ARGUMENTS, f"--user-data-dir={profile}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "HOME": str(directory)}, start_new_session=True,
        )  # fmt: skip
    try:
        port = await _port(profile / "DevToolsActivePort", process, directory / "chromium.log")
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{port}/json") as answer:
                (page,) = [each for each in await answer.json() if each["type"] == "page"]
            async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                receiver = asyncio.create_task(tab.receive())
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
            await receiver
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process, log: Path) -> int:
    loop = asyncio.get_running_loop()
    end = loop.time() + GUARD_S
    while not (lines := _lines(file)):
        assert process.returncode is None, _lines(log)[-20:]
        assert loop.time() < end, _lines(log)[-20:]
        await asyncio.sleep(0.1)
    return int(lines[0])


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def _lines(file: Path) -> list[str]:
    """The finished lines of a file; none before it exists."""
    return file.read_text().split("\n")[:-1] if file.exists() else []
