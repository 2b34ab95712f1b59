"""An engine as a process of its own, which tests kill: it answers lines, refuses, and dies at random.

Run as a program: PORT MOST DEATHS, the most requests at a time (more get 429), and the probability that a
request ends the process. GET /answered has the number of answers, and GET /running that of open requests; POST /most/N
changes MOST.
Fields of a body decide about its answer:

- `seconds`: how long it takes;
- `wrong`: it is a 400;
- `refusal`: it is a refusal of this status, with `retry_after`;
- `answer_bytes`: so many bytes are added to it;
- `numbers`: so many numbers are added to it, as embeddings have them;
- `poison`: it has this text, which may be the mark that ends a process of `poisoned_batch`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.guards import GUARD_S


class Engine:
    """What the program serves."""

    def __init__(self, most: int, deaths: float) -> None:
        self.most, self.deaths = most, deaths
        self.running = 0
        self.answered = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/{path:.*}", self.answer)
        app.router.add_get("/{what:answered|running}", self.count)
        app.router.add_post("/most/{most}", self.take)
        return app

    async def count(self, request: web.Request) -> web.Response:
        return web.json_response(getattr(self, request.match_info["what"]))

    async def take(self, request: web.Request) -> web.Response:
        self.most = int(request.match_info["most"])
        return web.Response()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.running >= self.most:
            return refusal(429, 1)
        if body.get("refusal"):
            return refusal(body["refusal"], body["retry_after"])
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
        found = {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": body["model"],
            "prompt": body["prompt"],
            "tier": tier,
            "choices": [choice],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        if body.get("poison"):
            found["poison"] = body["poison"]
        text = json.dumps(found).removesuffix("}").encode() + more(body) + b"}"
        return web.Response(body=text, content_type="application/json")


def refusal(status: int, retry_after_s: int) -> web.Response:
    """Return an answer that asks the client to wait."""
    return web.json_response(
        {"error": {"code": "queue_full", "message": "full"}},
        status=status,
        headers={"Retry-After": str(retry_after_s)},
    )


def more(body: dict[str, Any]) -> bytes:
    """Return the large members that a body asks its answer to have. They cost the engine nothing."""
    found = b""
    if body.get("answer_bytes"):
        found += b', "more": "' + b"x" * body["answer_bytes"] + b'"'
    if body.get("numbers"):
        found += b', "embedding": [' + b",".join([b"-0.01234567890123"] * body["numbers"]) + b"]"
    return found


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
                (sys.executable, "-m", __name__, str(self.port), str(self.most), str(self.deaths)),
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

    async def asked(self, what: str) -> int:
        """Return a number that it has: `answered` or `running`."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.port}/{what}") as answer,
        ):
            return int(await answer.json())

    async def take(self, most: int) -> None:
        """Change how many requests it takes at a time, until it ends."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{self.port}/most/{most}") as answer,
        ):
            assert answer.status == 200

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
