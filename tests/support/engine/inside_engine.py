"""A real vLLM for CPU with our code inside, and no supervisor around it: tests write shared memory themselves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from fleetkeeper_engine.in_vllm.vllm_settings import (
    ENVIRONMENT,
    FORKING_SERVER,
    INTERNAL_HEADER,
    MIDDLEWARE,
    SCHEDULER_FACTORY,
    VllmSettings,
)
from fleetkeeper_engine.shm.layout import (
    HeartbeatBlock,
    MiddlewareBlock,
    SchedulerBlock,
    SupervisorBlock,
)
from fleetkeeper_engine.shm.ledger import FILE as LEDGER
from fleetkeeper_engine.shm.region import ENVIRONMENT as REGION_ENVIRONMENT
from fleetkeeper_engine.shm.region import Region
from tests.support.engine import engine_environment
from tests.support.engine.engine_environment import PYTHON, free_port, make_tiny_model
from tests.support.guards import GUARD_S

MODEL = "tiny"
TOKEN = "internal-token-of-a-test"
START_S = 900.0
"""Seconds on an idle machine, many minutes on a crowded one; a hung start is told apart by its log."""
REQUEST_S = 600.0
"""For a request, which may wait for a thousand tokens of others on a slow machine."""
THREADS = str(max(1, (os.cpu_count() or 2) - 1))
"""As the supervisor has it: a core is left to the API server, or every step waits for a thread without one."""

SETTINGS = VllmSettings(
    max_sequences=64,
    min_sequences=1,
    max_tokens=2048,
    min_tokens=64,
    realtime_queue_limit=64,
    standard_queue_limit=96,
    batch_queue_limit=256,
    batch_ageing_s=3.0,
    queue_wait_objective_s=30.0,
    internal_token=TOKEN,
)


STOCK_SERVER = "vllm.entrypoints.openai.api_server"
SERVER = FORKING_SERVER if engine_environment.ENVIRONMENT.name == ".venv-engine" else STOCK_SERVER
"""As the supervisor chooses it: it lets only the present vLLM fork its processes."""
INSIDE = (f"--scheduler-cls={SCHEDULER_FACTORY}", f"--middleware={MIDDLEWARE}")
"""The arguments that load our code."""


def vllm_argv(model: Path, port: int, settings: VllmSettings) -> list[str]:
    """The command that starts vLLM, without our code."""
    return [
        str(PYTHON),
        "-m",
        SERVER,
        f"--model={model}",
        f"--served-model-name={MODEL}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=2048",
        f"--max-num-seqs={settings.max_sequences}",
        f"--max-num-batched-tokens={settings.max_tokens}",
        f"--kv-cache-memory-bytes={512 * 1024**2}",
        "--scheduling-policy=priority",
        "--api-server-count=1",
        "--shutdown-timeout=0",
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]


@dataclass
class Answer:
    """What a streamed request came to."""

    status: int
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    """When each chunk came, by time.monotonic."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class InsideEngine:
    """A vLLM process with our code inside, and its shared memory."""

    def __init__(
        self,
        directory: Path,
        settings: VllmSettings = SETTINGS,
        *,
        environment: dict[str, str] | None = None,
        layers: int = 4,
        arguments: Sequence[str] = (),
        inside: Sequence[str] = INSIDE,
    ) -> None:
        self.settings = settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._shared_memory = Path(tempfile.mkdtemp(prefix="fleetkeeper-", dir="/dev/shm"))
        self.region = Region.create(self._shared_memory / "region")
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": THREADS,
            **(environment or {}),
            REGION_ENVIRONMENT: str(self._shared_memory / "region"),
            ENVIRONMENT: settings.to_json(),
        }
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"vllm-{self.port}.log"
        model = make_tiny_model(directory / "model", layers)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*vllm_argv(model, self.port, settings), *inside, *arguments],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._await_health()

    @property
    def ledger(self) -> Path:
        """The file with the tokens of each request."""
        return self._shared_memory / LEDGER

    def kill(self) -> None:
        """Ends all processes at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def stop(self) -> None:
        """Ends vLLM and its session."""
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        except ProcessLookupError:
            self._process.wait(10)
        shutil.rmtree(self._shared_memory, ignore_errors=True)

    def cpu_s(self) -> float:
        """Seconds of processor time that all its processes took so far."""
        return sum(_cpu_s(stat, self._process.pid) for stat in Path("/proc").glob("[0-9]*/stat"))

    def scheduler(self) -> SchedulerBlock:
        """What the engine says now."""
        block = self.region.read_scheduler()
        assert block is not None
        return block

    def heartbeat(self) -> HeartbeatBlock:
        """What it said before its last step."""
        return self.region.read_heartbeat()

    def middleware(self) -> MiddlewareBlock:
        """What the middleware says now."""
        block = self.region.read_middleware()
        assert block is not None
        return block

    async def middleware_now(self) -> MiddlewareBlock:
        """The middleware's block with everything in it that happened before this call.

        It is written up to 200 ms late; the one with this generation is late no more.
        """
        block = self.region.read_supervisor() or SupervisorBlock()
        block = replace(block, generation=block.generation + 1)
        self.region.write_supervisor(block)
        await self.until(lambda: self.middleware().generation == block.generation)
        return self.middleware()

    def set_block(self, **changes: object) -> SupervisorBlock:
        """Writes the supervisor's block: the next generation, with a lease of an hour by default."""
        last = self.region.read_supervisor()
        block = SupervisorBlock(
            generation=1 if last is None else last.generation + 1,
            lease_deadline=time.monotonic() + 3600,
        )
        block = replace(block, **changes)  # type: ignore[arg-type]
        self.region.write_supervisor(block)
        return block

    def free_all(self) -> None:
        """End the lease: start-up values."""
        self.set_block(lease_deadline=0.0)

    async def stream(
        self,
        session: aiohttp.ClientSession,
        max_tokens: int,
        *,
        tier: str = "standard",
        prompt: str | list[int] = "one two three",
        opened: asyncio.Event | None = None,
        **body: object,
    ) -> Answer:
        """One streamed completion of exactly `max_tokens` tokens, unless it is refused.

        `opened` is set when its status has come.
        """
        request = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        headers = {"X-Inference-Tier": tier}
        async with session.post(
            f"{self.url}/v1/completions", json=request, headers=headers
        ) as response:
            answer = Answer(response.status, headers=dict(response.headers))
            if opened is not None:
                opened.set()
            if response.status != 200:
                answer.body = await response.read()
                return answer
            async for line in response.content:
                if line.startswith(b"data: {"):
                    answer.times.append(time.monotonic())
                    usage = json.loads(line[6:]).get("usage")
                    if usage:
                        answer.tokens = usage["completion_tokens"]
            return answer

    async def complete(
        self, session: aiohttp.ClientSession, max_tokens: int, *, tier: str = "standard"
    ) -> Answer:
        """One completion of exactly `max_tokens` tokens, answered whole, unless it is refused."""
        request = {
            "model": MODEL,
            "prompt": "one two three",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        headers = {"X-Inference-Tier": tier}
        async with session.post(
            f"{self.url}/v1/completions", json=request, headers=headers
        ) as response:
            answer = Answer(response.status, headers=dict(response.headers))
            answer.body = await response.read()
            if response.status == 200:
                answer.tokens = json.loads(answer.body)["usage"]["completion_tokens"]
            return answer

    async def until(self, true: Callable[[], bool], within_s: float = GUARD_S) -> float:
        """Waits until something is true of shared memory; returns how long that took."""
        started = time.monotonic()
        while not true():
            waited = time.monotonic() - started
            assert waited < within_s, (
                f"not so within {within_s} s: {self.middleware()} {self.scheduler()}"
            )
            await asyncio.sleep(0.002)
        return time.monotonic() - started

    async def until_idle(self) -> None:
        """Waits until nothing is queued, running or on its way."""

        def idle() -> bool:
            block, queue = self.scheduler(), self.middleware()
            return not any(
                (
                    *block.running,
                    *block.waiting,
                    self.heartbeat().steps,
                    *queue.waiting,
                    *queue.released,
                )
            )

        await self.until(idle)

    def _await_health(self) -> None:
        """Returns when vLLM answers and has taken its first steps; stops it when it does not start."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        self._warm()
                        return
            except OSError:
                time.sleep(0.25)
        tail = self.log.read_text(errors="replace")[-3000:]
        self.stop()
        raise AssertionError(f"vLLM did not start:\n{tail}")

    def _warm(self) -> None:
        """The first steps are slow: kernels are chosen and threads started."""
        body = {"model": MODEL, "prompt": ["one two three"] * 8, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", INTERNAL_HEADER: TOKEN},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            assert answer.status == 200


def _cpu_s(stat: Path, session: int) -> float:
    """Of one process, 0.0 when it is of another session or has ended."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # As proc(5) counts them: session is field 6, utime 14, stime 15; the first here is field 3.
    ticks = int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without limits; each request on a connection of its own, as routers' clients are."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session
