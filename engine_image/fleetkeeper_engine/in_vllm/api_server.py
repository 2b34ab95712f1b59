"""vLLM's server on CPU with processes that are forked: what all of them import is imported once.

vLLM spawns EngineCore and the workers on CPU, and each imports vLLM and torch again: two thirds of
the processor time of a start. It forks them on CUDA. This module imports vLLM in one thread, before
any event loop and any parallel region of torch, and lets vLLM fork. The supervisor decides where it
is used (`launch.argv`). The name of the file is in vLLM's messages about options.

Before it starts EngineCore, vLLM imports itself once more, in a process that only inspects the class
of the model, so that the server gets no CUDA context. On CPU there is none, so the server inspects
the class itself: a quarter of the processor time that is left.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger("vllm.fleetkeeper")

T = TypeVar("T")

STOCK = "vllm.entrypoints.openai.api_server"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
CONTEXT = "vllm.utils.system_utils"
"""The module with `get_mp_context`, from which vLLM takes its processes."""
REGISTRY = "vllm.model_executor.models.registry"
"""The module with `_run_in_subprocess`, by which vLLM inspects a model's class."""
IMPORTED = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    ENTRY,
)
"""Modules that API server, EngineCore or workers import."""


class CannotForkError(RuntimeError):
    """This vLLM differs from those that were tested."""


def prepare_fork() -> Callable[[], None]:
    """Import vLLM, have it fork its processes, and return the `main` of its server.

    Raises:
        CannotForkError: if a needed name is missing, or an import started a thread.
    """
    try:
        stock = importlib.import_module(CONTEXT).get_mp_context
        for name in IMPORTED:
            importlib.import_module(name)
        registry = vars(importlib.import_module(REGISTRY))
        main: Callable[[], None] = sys.modules[ENTRY].main
    except (ImportError, AttributeError) as error:
        raise CannotForkError(f"{type(error).__name__}: {error}") from error
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise CannotForkError(f"there are several threads after the imports: {names}")
    for name, module in sys.modules.items():
        # Modules have bound the function by its name.
        if name.startswith("vllm.") and vars(module).get("get_mp_context") is stock:
            vars(module)["get_mp_context"] = fork_context
    # Without this name, vLLM only starts later.
    registry["_run_in_subprocess"] = run_here
    os.register_at_fork(after_in_child=leave_server)
    return main


def fork_context() -> Any:  # noqa: ANN401 - as vLLM's
    """Return the context of processes that are forked."""
    return multiprocessing.get_context("fork")


def run_here(ask: Callable[[], T]) -> T:
    """Return the answer without a process of its own."""
    return ask()


def leave_server() -> None:
    """Release what a forked process has from its parent and would not have if it were spawned.

    Its signals would wake the event loop of the API server, which would take them for its own. A
    port that it holds open would keep clients waiting instead of refusing them.
    """
    signal.set_wakeup_fd(-1)
    with Path(os.devnull).open("rb") as nothing:
        for entry in list(Path("/proc/self/fd").iterdir()):
            if _has_address(descriptor := int(entry.name)):
                # The number stays taken, because an object of the parent will close it.
                os.dup2(nothing.fileno(), descriptor, inheritable=False)


def _has_address(descriptor: int) -> bool:
    """Return whether it is a socket that is bound, so not half of a pair."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            found = socket.socket(fileno=descriptor)
            try:
                name = found.getsockname()
            finally:
                found.detach()
            return bool(name[1] if isinstance(name, tuple) else name)
    return False


def main() -> None:
    """Start vLLM's server; as vLLM itself does it if its processes cannot be forked."""
    try:
        serve = prepare_fork()
    except CannotForkError as error:
        logger.warning("vLLM's processes are spawned, the start takes longer: %s", error)
        runpy.run_module(STOCK, run_name="__main__", alter_sys=True)
    else:
        serve()


if __name__ == "__main__":
    main()
