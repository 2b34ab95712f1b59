"""An engine as a process of its own, which tests kill: it answers lines, refuses, and dies at random.

Run as a program: PORT MOST DEATHS, the most requests at a time (more get 429), and the probability that a
request ends the process. A body's `seconds` is how long its answer takes,
and one with `wrong` gets 400. GET /answered tells the number of answers.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

GUARD_S = 120.0


class Engine:
    """What the program serves."""

    def __init__(self, most: int, deaths: float) -> None:
        self.most, self.deaths = most, deaths
        self.running = 0
        self.answered = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/{path:.*}", self.answer)
        app.router.add_get("/answered", self.count)
        return app

    async def count(self, _request: web.Request) -> web.Response:
        return web.json_response(self.answered)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.running >= self.most:
            return web.json_response(
                {"error": {"code": "queue_full", "message": "full"}},
                status=429,
                headers={"Retry-After": "1"},
            )
        self.running += 1
        try:
            await asyncio.sleep(float(body.get("seconds", 0.0)))
            if random.random() < self.deaths:
                os._exit(1)
        finally:
            self.running -= 1
        self.answered += 1
        tier = request.headers.get("X-Inference-Tier")
        if body.get("wrong"):
            error = {"code": "wrong", "message": "the line says so", "tier": tier}
            return web.json_response({"error": error}, status=400)
        choice = {"index": 0, "text": "a", "finish_reason": "stop"}
        return web.json_response(
            {
                "id": "cmpl-1",
                "object": "text_completion",
                "model": body["model"],
                "prompt": body["prompt"],
                "tier": tier,
                "choices": [choice],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )


@dataclass
class BatchEngine:
    """The process."""

    directory: Path
    port: int
    most: int = 64
    deaths: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.directory / "engine.log"

    @property
    def alive(self) -> bool:
        """Return whether it runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> BatchEngine:
        """Start it and wait until it listens."""
        offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                (sys.executable, __file__, str(self.port), str(self.most), str(self.deaths)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + GUARD_S
        while b"Running on" not in self.log.read_bytes()[offset:]:
            assert self.alive, self.log.read_text()[-2000:]
            assert time.monotonic() < end, self.log.read_text()[-2000:]
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(GUARD_S)


if __name__ == "__main__":
    port, most, deaths = sys.argv[1:]
    web.run_app(
        Engine(int(most), float(deaths)).app(),
        host="127.0.0.1",
        port=int(port),
        access_log=None,
        print=lambda *text: print(*text, flush=True),
    )
