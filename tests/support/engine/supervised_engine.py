"""A whole engine on this machine, without Kubernetes: the supervisor and its vLLM on the tiny model."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine.engine_environment import PYTHON, free_port
from tests.support.engine.signer import ISSUER, Signer
from tests.support.guards import GUARD_S

START_TIMEOUT_S = 800.0
"""Half a minute on two idle cores; machines under test are shared."""
POLL_S = 0.1
GIB = 1024**3
COMPILED = "inductor"
"""The folder in an engine's directory with what its vLLM compiled, for those that start with none."""
FULL_LOAD = 64
"""Sequences at once under full load: the start-up value."""

Document = dict[str, Any]


def with_config(model: Path, target: Path, **config: Any) -> Path:
    """A copy of the model whose config says something else."""
    shutil.copytree(model, target)
    written = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**written, **config}))
    return target


EXTRA_ARGUMENT = "--enable-server-load-tracking"
"""An argument that only an engine profile may hold."""


def desired_document(model: Path, keys: Path, /, **sections: Document) -> Document:
    """A document for the tiny model; each section given replaces single fields of the default."""
    document: Document = {
        "contract": 1,
        "accelerator": "cpu",
        "model": {"source": str(model), "servedName": "tiny"},
        "engine": {
            "dtype": "float32",
            "maxModelLength": 2048,
            "options": {"enforce-eager": "true"},
        },
        "memory": {"limitBytes": 4 * 1024**3},
        "batching": {
            "maxSequences": 64,
            "minSequences": 1,
            "maxTokens": 2048,
            "minTokens": 256,
        },
        "drain": {"seconds": 60, "noticeSeconds": 1},
        "ports": {"host": "127.0.0.1", "serving": free_port(), "control": free_port()},
        "control": {"issuer": ISSUER, "keysDirectory": str(keys)},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return document


@dataclass
class Stream:
    """What a client got of a streamed answer."""

    status: int = 0
    body: bytes = b""
    broken: str = ""
    """How the connection failed, when it did."""

    @property
    def events(self) -> list[bytes]:
        """The whole events; each ends with an empty line."""
        return self.body.split(b"\n\n")[:-1]

    @property
    def rest(self) -> bytes:
        """What follows the last whole event: empty unless a frame was cut in half."""
        return self.body.rpartition(b"\n\n")[2]

    @property
    def tokens(self) -> int:
        """By the usage that each event tells: an event may carry more than one token."""
        told = re.findall(rb'"completion_tokens":(\d+)', self.body)
        return int(told[-1]) if told else 0


class OutputPipe:
    """The pipe of an engine's output, copied to a file until it is stalled, as by a runtime that hangs."""

    def __init__(self, file: Path) -> None:
        self._reading, self.writing = os.pipe()
        self._file = file
        self._goes = threading.Event()
        self._goes.set()
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        with self._file.open("wb") as log:
            while data := os.read(self._reading, 65_536):
                log.write(data)
                log.flush()
                self._goes.wait()

    def stall(self) -> None:
        """Read no more."""
        self._goes.clear()

    def resume(self) -> None:
        """Read on."""
        self._goes.set()


def _connecting_session() -> requests.Session:
    """Return a session with a connection for each request.

    The server closes a connection that was idle for five seconds, and may do so as the next request is sent.
    """
    session = requests.Session()
    session.headers["Connection"] = "close"
    return session


@dataclass
class RunningEngine:
    """A supervisor and its vLLM."""

    document: Document
    signer: Signer
    directory: Path
    process: subprocess.Popen[bytes]
    uid: str
    session: requests.Session = field(default_factory=_connecting_session)
    generation: int = 0
    run_directory: Path | None = None
    cgroup: Path | None = None
    """The directory of its memory cgroup, when it has one of its own."""
    output: OutputPipe | None = None
    """Its output, if that is a pipe instead of a file."""

    @property
    def url(self) -> str:
        """Of vLLM's API."""
        return f"http://127.0.0.1:{self.document['ports']['serving']}"

    @property
    def control_url(self) -> str:
        """Of the control port."""
        return f"http://127.0.0.1:{self.document['ports']['control']}"

    @property
    def log(self) -> str:
        """Everything the supervisor and vLLM wrote."""
        return (self.directory / "log").read_text(errors="replace")

    def termination(self) -> dict[str, Any]:
        """The termination line, parsed."""
        lines = (self.directory / "termination").read_text().splitlines()
        if len(lines) != 1:
            raise AssertionError(f"the termination log has {len(lines)} lines, one was expected")
        parsed: dict[str, Any] = json.loads(lines[0])
        return parsed

    def health(self, name: str) -> int:
        """The status of /healthz/NAME; 0 when nothing answers."""
        try:
            return self.session.get(
                f"{self.control_url}/healthz/{name}", timeout=GUARD_S
            ).status_code
        except requests.RequestException:
            return 0

    def wait_for(self, holds: Callable[[], object], what: str, timeout_s: float = GUARD_S) -> float:
        """Waits until something holds; returns the seconds it took.

        Raises:
            AssertionError: when it does not in time, or the engine ended.
        """
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > timeout_s:
                raise AssertionError(f"waited {timeout_s:.0f} s for {what}\n{self.log[-3000:]}")
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the engine ended with {self.process.returncode} before {what}\n{self.log[-3000:]}"
                )
            time.sleep(POLL_S)
        return time.monotonic() - began

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Waits until the pod would get requests."""
        return self.wait_for(lambda: self.health("ready") == 200, "ready", timeout_s)

    def wait_idle(self, timeout_s: float = GUARD_S) -> float:
        """Waits until no request is queued or runs."""

        def idle() -> bool:
            busy = ("fleetkeeper_waiting{", "fleetkeeper_running{")
            return not any(v for name, v in self.metrics().items() if name.startswith(busy))

        return self.wait_for(idle, "nothing waits or runs", timeout_s)

    def wait_end(self, timeout_s: float = GUARD_S) -> int:
        """Waits until the supervisor ended; its exit code."""
        return self.process.wait(timeout_s)

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels: `name{label="value",...}` with sorted labels."""
        text = self.session.get(f"{self.control_url}/metrics", timeout=GUARD_S).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def limits(self, method: str, token: str | None, body: object = None) -> requests.Response:
        """A request for /v1/limits with the given token."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return self.session.request(
            method, f"{self.control_url}/v1/limits", headers=headers, json=body, timeout=GUARD_S
        )

    def put_limits(
        self, sequences: int, tokens: int, lease_s: int = 120, **more: object
    ) -> requests.Response:
        """LimitsLease limits with a valid token and the next generation."""
        self.generation += 1
        body = {
            "sequences": sequences,
            "tokens": tokens,
            "leaseSeconds": lease_s,
            "generation": self.generation,
            **more,
        }
        return self.limits("PUT", self.signer.token(self.uid), body)

    def complete(self, tokens: int = 8, **body: object) -> requests.Response:
        """One completion, awaited."""
        asked = {"model": "tiny", "prompt": "The queue", "max_tokens": tokens, "ignore_eos": True}
        return self.session.post(f"{self.url}/v1/completions", json={**asked, **body}, timeout=600)

    def vllm_process(self, title: str) -> psutil.Process:
        """The process of vLLM whose title contains a word: APIServer, EngineCore, Worker.

        Raises:
            AssertionError: when there is none.
        """
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if title in words or (title == "APIServer" and "api_server" in words):
                    return process
        raise AssertionError(f"there is no process {title}")

    async def stream(
        self, session: aiohttp.ClientSession, tokens: int, prompt: str = "one two"
    ) -> Stream:
        """One streamed completion, read to its end, whatever the end is."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        found = Stream()
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                found.status = response.status
                async for chunk in response.content.iter_any():
                    found.body += chunk
        except aiohttp.ClientError as error:
            found.broken = repr(error)
        return found

    def stop(self, timeout_s: float = 60.0) -> int:
        """Ends it as Kubernetes does (SIGTERM, then SIGKILL); the exit code."""
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
            for process in family:
                with suppress(psutil.Error):
                    process.kill()
        self.session.close()
        if self.run_directory is not None:
            shutil.rmtree(self.run_directory, ignore_errors=True)
        return self.process.wait(10)


def start_engine(
    document: Document,
    signer: Signer,
    directory: Path,
    *,
    python: Path = PYTHON,
    launcher: Path | None = None,
    environment: Mapping[str, str] | None = None,
    before_exec: Callable[[], None] | None = None,
    output: OutputPipe | None = None,
) -> RunningEngine:
    """Starts a supervisor with a document, as its container would.

    Args:
        document: what FLEETKEEPER_ENGINE holds.
        signer: whose limits requests it accepts.
        directory: for its log, its shared memory and its termination line.
        python: which environment runs it.
        launcher: the script of an installed copy instead of the module.
        environment: more variables.
        before_exec: runs in the new process, before the supervisor (to enter a cgroup).
        output: a pipe for its output instead of the file `log` in the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    run_directory = Path("/dev/shm") / f"fleetkeeper-{secrets.token_hex(4)}"
    uid = f"pod-{secrets.token_hex(8)}"
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "FLEETKEEPER_"))},
        "FLEETKEEPER_ENGINE": json.dumps(document),
        "FLEETKEEPER_RUN": str(run_directory),
        "FLEETKEEPER_TERMINATION_LOG": str(directory / "termination"),
        "POD_UID": uid,
        **(environment or {}),
    }
    argv = [python, launcher] if launcher else [python, "-m", "fleetkeeper_engine.cli"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in argv],
            env=variables,
            stdout=log if output is None else output.writing,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,  # noqa: PLW1509 - a cgroup must be entered before exec
        )
    if output is not None:
        os.close(output.writing)
    return RunningEngine(
        document, signer, directory, process, uid, run_directory=run_directory, output=output
    )


def full_load(engine: RunningEngine) -> None:
    """All 64 sequences at once, with prompts that fill the largest steps."""
    with ThreadPoolExecutor(FULL_LOAD) as pool:
        prompts = ([5 + number, *range(5, 805)] for number in range(FULL_LOAD))
        answers = [pool.submit(engine.complete, 32, prompt=prompt) for prompt in prompts]
        assert {answer.result().status_code for answer in answers} == {200}


@contextmanager
def stopped(engine: RunningEngine, title: str) -> Iterator[float]:
    """SIGSTOP to a process of vLLM; SIGCONT afterwards when it is still there."""
    process = engine.vllm_process(title)
    process.send_signal(signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def eight_running(
    engine: RunningEngine, pool: ThreadPoolExecutor, tokens: int
) -> list[Future[int]]:
    """Eight requests, all running; their statuses to come."""
    found = [pool.submit(lambda: engine.complete(tokens).status_code) for _ in range(8)]
    engine.wait_for(lambda: engine.metrics()['fleetkeeper_running{tier="standard"}'] == 8, "load")
    return found


def assert_within_cap(engine: RunningEngine, pod_gib: int) -> None:
    """The highest sample since the start, every 100 ms one, is below the cap."""
    metrics = engine.metrics()
    peak, cap = metrics["fleetkeeper_memory_peak_ratio"], metrics["fleetkeeper_memory_cap_ratio"]
    print(f"pod of {pod_gib} GiB: peak {100 * peak:.1f}%, cap {100 * cap:.0f}%")
    assert metrics["fleetkeeper_memory_over_cap"] == 0
    assert peak * pod_gib > 1.5, "vLLM alone takes so much: it was measured"
    assert peak <= cap == 0.8


StartEngine = Callable[..., RunningEngine]
"""The fixture `start`: `start(document, sections={...}, pod_bytes=..., **of start_engine)`."""
