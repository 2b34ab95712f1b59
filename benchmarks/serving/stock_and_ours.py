"""An engine with Fleetkeeper's supervisor, and stock vLLM with the same options, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetkeeper.api.parse import parse_service
from fleetkeeper.autoscale.settings import settings_of
from fleetkeeper.autoscale.types import ControlSettings
from tests.support.engine_environment import STOCK_PYTHON, free_port, make_tiny_model
from tests.support.service_world import tiny
from tests.support.signer import Signer
from tests.support.supervised_engine import (
    START_TIMEOUT_S,
    RunningEngine,
    desired_document,
    start_engine,
)

MODEL = "tiny"
MAX_SEQUENCES = 64
MAX_TOKENS = 2048
OURS = ("--scheduler-cls=", "--middleware=")
"""The options that load our code; stock vLLM starts with all others."""


def desired_service() -> dict[str, Any]:
    """Return examples/tiny.yaml with one replica and limits up to 64 sequences."""
    return tiny(
        scaling={"minReplicas": 1, "maxReplicas": 1},
        batching={"maxSequences": MAX_SEQUENCES, "maxTokens": MAX_TOKENS},
    )


def control_settings() -> ControlSettings:
    """Return what the control loop reads of this service."""
    manifest = desired_service()
    manifest["metadata"] |= {"namespace": "benchmark", "uid": "u", "generation": 1}
    return settings_of(parse_service(manifest).spec, 1)


def stock_argv(ours: list[str], port: int) -> list[str]:
    """Return the command of stock vLLM: our engine's, without our code and on another port.

    >>> stock_argv(["py", "-m", "api", "--port=1", "--scheduler-cls=a.B", "--max-num-seqs=4"], 2)[1:]
    ['-m', 'api', '--port=2', '--max-num-seqs=4']
    """
    kept = [word for word in ours[1:] if not word.startswith(OURS)]
    return [str(STOCK_PYTHON), *(_on_port(word, port) for word in kept)]


def _on_port(word: str, port: int) -> str:
    return f"--port={port}" if word.startswith("--port=") else word


@dataclass(frozen=True, slots=True)
class Pair:
    """Both engines, ready."""

    ours: RunningEngine
    stock_url: str


@contextmanager
def running_pair(directory: Path, before_exec: Callable[[], None]) -> Iterator[Pair]:
    """Run both engines until the block is left; `before_exec` runs in each new process."""
    spec = desired_service()["spec"]
    signer = Signer(directory / "keys")
    document = desired_document(
        make_tiny_model(directory / "model"),
        signer.directory,
        engine={"maxModelLength": 2048, "prefixCaching": False},
        batching={name: spec["batching"][name] for name in ("minSequences", "minTokens")}
        | {"maxSequences": MAX_SEQUENCES, "maxTokens": MAX_TOKENS},
        tiers=spec["tiers"],
        objectives={"queueWaitMilliseconds": spec["objectives"]["queueWaitMilliseconds"]},
    )
    engine = start_engine(document, signer, directory / "ours", before_exec=before_exec)
    try:
        engine.wait_ready()
        with running_stock(engine, directory, before_exec) as url:
            yield Pair(engine, url)
    finally:
        engine.stop()


@contextmanager
def running_stock(
    engine: RunningEngine, directory: Path, before_exec: Callable[[], None]
) -> Iterator[str]:
    """Run stock vLLM with the options and the environment of our engine's vLLM; yield its URL."""
    vllm = engine.vllm_process("APIServer")
    environment = {
        name: value
        for name, value in vllm.environ().items()
        if not name.startswith("FLEETKEEPER_") and name != "PYTHONPATH"
    }
    port = free_port()
    log = directory / "stock.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            stock_argv(vllm.cmdline(), port),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,  # noqa: PLW1509 - a cgroup must be entered before exec
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, url, log)
        yield url
    finally:
        _end(process)


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.25)
    raise RuntimeError(f"stock vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group that was started here."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            process.wait(10)
        return
