"""What an operator's process runs in tests: `fleetkeeper run` without the command line, in a forked process.

Forked from a process that has imported the operator, it starts in a tenth of the processor time. Its
environment has settings of its own beside the operator's:

KILL_AT=chat:3:applied sends SIGKILL when the answer to the third write for the service `chat` begins
to arrive, before it is read. WRITES_FILE names a file that gets a line for each write that is about
to be sent. WAITS shortens waits, so that a test need not sit them out: a JSON object from
"module.CONSTANT" below fleetkeeper to seconds. WALL_OFF_S sets the machine's wall clock wrong by so many
seconds, as far as the process sees it. BREAK=reconciler.controller.decide_plan:bad makes a step below
fleetkeeper.runtime fail whenever it is for the service `bad`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from fleetkeeper.adapters.kubernetes.writes import Write, WriteHook, WritePoint
from fleetkeeper.events import watch_services
from fleetkeeper.runtime.main import run_operator
from fleetkeeper.runtime.plan_context import plan_context
from fleetkeeper.runtime.settings import load_settings
from fleetkeeper.runtime.telemetry.logs import configure_logs

SHARED = "autoscale.constants"
"""The module whose constants others import by name."""


def run(environment: Mapping[str, str], log: Path, command: tuple[str, ...]) -> None:
    """Become an operator with this environment and log; with a command, become that program."""
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if command:
        os.execv(command[0], command)
    shorten_waits()
    set_wall_clock_wrong()
    break_step()
    settings = load_settings()
    configure_logs(settings.log_level, settings.log_format)
    operator = run_operator(
        settings, plan_context(settings), watch=watch_services, hook=killing_hook()
    )
    sys.exit(asyncio.run(operator))


def killing_hook() -> WriteHook:
    """Counts writes and ends the process, as `kill -9` does, where KILL_AT says."""
    name, number, point_text = (os.environ.get("KILL_AT") or "::").split(":")
    file = os.environ.get("WRITES_FILE")
    count = 0

    def hook(point: WritePoint, write: Write) -> None:
        nonlocal count
        if point is WritePoint.BEFORE and file:
            with Path(file).open("a", encoding="utf-8") as lines:
                lines.write(f"{write.verb} {write.kind} {write.name}\n")
        if not name or not _concerns(write, name):
            return
        count += point is WritePoint.BEFORE
        if point.value == point_text and count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def shorten_waits() -> None:
    """Set the constants that WAITS names; one that is missing is a mistake of the test."""
    for path, seconds in json.loads(os.environ.get("WAITS") or "{}").items():
        module_name, _, name = path.rpartition(".")
        is_shared = module_name.startswith("fleetkeeper_")  # a distribution beside the operator
        module = import_module(module_name if is_shared else f"fleetkeeper.{module_name}")
        usual = getattr(module, name)
        assert 0 < seconds < usual, path
        setattr(module, name, seconds)
        if module_name == SHARED:
            _set_where_imported(name, usual, seconds)


def _set_where_imported(name: str, usual: float, seconds: float) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("fleetkeeper.") and getattr(module, name, None) is usual:
            setattr(module, name, seconds)


def set_wall_clock_wrong() -> None:
    """Adds WALL_OFF_S to what time.time() answers, before anything has read it."""
    off_s, right = float(os.environ.get("WALL_OFF_S") or 0), time.time
    time.time = lambda: right() + off_s


def break_step() -> None:
    """Lets a step fail for one service, as BREAK says."""
    path, _, service = (os.environ.get("BREAK") or "").partition(":")
    if not path:
        return
    from tests.support.operators.isolation_world import Fault  # noqa: PLC0415 - only a broken operator needs it

    module_name, _, name = path.rpartition(".")
    module = import_module(f"fleetkeeper.runtime.{module_name}")
    fault = Fault(service, RecursionError("broken by a test"))
    setattr(module, name, fault.wrap(getattr(module, name)))


def _concerns(write: Write, service: str) -> bool:
    """Whether it is a write of that service, of a child or of an event of it."""
    return write.name == service or write.name.startswith((f"{service}-fk-", f"{service}."))
