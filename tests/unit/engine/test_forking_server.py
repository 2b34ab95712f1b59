"""The module that lets vLLM fork its processes: when it is used, what it changes, and its way back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_engine.in_vllm.vllm_settings import FORKING_SERVER
from fleetkeeper_engine.supervisor.launch.argv import FORKED_VERSIONS, decided_entry
from fleetkeeper_engine.supervisor.launch.features import Features
from tests.support.engine.engine_documents import a_document
from tests.support.engine.engine_environment import ROOT

STOCK = "vllm.entrypoints.openai.api_server"
TRACING = {"endpoint": "http://traces:4318", "namespace": "team"}
PROFILE = {"name": "numa", "extraArguments": ["--numa-bind"]}
CONTEXT = """
import multiprocessing

def get_mp_context():
    return multiprocessing.get_context("spawn")
"""
REGISTRY = """
def _run_in_subprocess(ask):
    raise SystemExit("a process of its own")

def inspect():
    return _run_in_subprocess(lambda: "inspected")
"""
ENTRY = """
import os, signal, socket, sys
from vllm.model_executor.models.registry import inspect
from vllm.v1.engine.core import get_mp_context

def main():
    server, (wakeup, _) = socket.socket(), socket.socketpair()
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    context = get_mp_context()
    ours, theirs = context.Pipe()
    reading, writing = os.pipe()

    def core():
        os.close(writing)
        theirs.recv()
        wakeup_left = signal.set_wakeup_fd(-1)
        refused = socket.socket().connect_ex(("127.0.0.1", port))
        os.set_blocking(reading, False)
        theirs.send((wakeup_left, refused, os.read(reading, 1)))

    context.Process(target=core).start()
    theirs.close()
    os.close(writing)
    server.listen()
    server.close()
    ours.send("closed")
    print(inspect(), "forked", *ours.recv(), *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("sections", "version", "environment", "reason"),
    [
        ({}, FORKED_VERSIONS[0], {}, ""),
        ({}, FORKED_VERSIONS[0], {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, ""),
        ({}, FORKED_VERSIONS[0], {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, ""),
        ({}, "0.33.0", {}, "vLLM 0.33.0 was not tested"),
        ({}, FORKED_VERSIONS[0], {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "is spawn"),
        ({}, FORKED_VERSIONS[0], {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, "is 0-3"),
        ({"engine": {"profile": PROFILE}}, FORKED_VERSIONS[0], {}, "numa-bind"),
        ({"engine": {"options": {"numa-bind": "true"}}}, FORKED_VERSIONS[0], {}, "numa-bind"),
        ({"tracing": TRACING}, FORKED_VERSIONS[0], {}, "tracing"),
        ({"model": {"source": "s3://b/m", "servedName": "m"}}, FORKED_VERSIONS[0], {}, "storage"),
    ],
)
def test_processes_are_forked_where_that_was_tested(
    sections: dict[str, Any], version: str, environment: dict[str, str], reason: str
) -> None:
    """Without a reason against it, and with one that the log line names."""
    features = Features(version, STOCK, Path())
    entry, why = decided_entry(a_document(**sections), features, environment)
    assert entry == (STOCK if reason else FORKING_SERVER)
    assert reason in why
    assert bool(reason) == bool(why)


def test_an_engine_on_cuda_is_started_as_ever() -> None:
    features = Features(FORKED_VERSIONS[0], STOCK, Path())
    assert decided_entry(a_document(accelerator="cuda"), features, {}) == (STOCK, "")


def a_vllm(site: Path, **modules: str) -> dict[str, str]:
    """The environment with a vLLM of these modules, by their names with `__` for dots."""
    core = "from vllm.utils.system_utils import get_mp_context"
    texts = {
        "utils__system_utils": CONTEXT,
        "model_executor__models__registry": REGISTRY,
        "v1__engine__core": core,
        "v1__engine__async_llm": "",
        "v1__executor__multiproc_executor": "",
        "v1__worker__cpu_worker": "",
        "v1__worker__cpu_model_runner": "",
        "entrypoints__launchers__api_server__entry": ENTRY,
        "entrypoints__openai__api_server": "import sys; print('stock', *sys.argv[1:])",
    }
    for name, text in {**texts, **modules}.items():
        file = site.joinpath("vllm", *name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {**os.environ, "PYTHONPATH": f"{site}:{ROOT / 'engine_image'}"}


def served(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", FORKING_SERVER, "--port=1"]
    return subprocess.run(
        argv, env=environment, capture_output=True, check=True, text=True, timeout=60
    )


def test_a_forked_process_has_neither_the_port_nor_the_signals_of_the_server(
    tmp_path: Path,
) -> None:
    """vLLM binds its port before it starts EngineCore; the child connects once the server closed it.

    A pipe whose writer has ended is at its end: workers notice the end of EngineCore so. The class
    of the model is inspected in the server.
    """
    words = ["inspected", "forked", "-1", str(errno.ECONNREFUSED), "b''", "--port=1"]
    assert served(a_vllm(tmp_path)).stdout.split() == words


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ({"utils__system_utils": ""}, "get_mp_context"),
        ({"v1__engine__core": "import vllm.no_such_module"}, "no_such_module"),
        ({"entrypoints__launchers__api_server__entry": ""}, "main"),
        (
            {
                "v1__engine__async_llm": "import threading; threading.Timer(0.5, print, ()).start()",
            },
            "several threads",
        ),
    ],
    ids=["no context", "no module", "no main", "a thread"],
)
def test_a_vllm_that_differs_is_started_as_it_is(
    tmp_path: Path, modules: dict[str, str], reason: str
) -> None:
    done = served(a_vllm(tmp_path, **modules))
    assert done.stdout.split() == ["stock", "--port=1"]
    assert reason in done.stderr
    assert "the start takes longer" in done.stderr
