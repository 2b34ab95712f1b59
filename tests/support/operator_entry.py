"""The operator's process with a hook that kills it: at the Nth write, at one of its three points.

KILL_AT=applied:3 sends SIGKILL when the answer to the third write begins to arrive, before it is
read. WRITES_FILE names a file that gets a line for each write that is about to be sent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from fleetkeeper.adapters.kubernetes.writes import Write, WriteHook, WritePoint
from fleetkeeper.events import watch_services
from fleetkeeper.runtime.logs import configure_logs
from fleetkeeper.runtime.main import run_operator
from fleetkeeper.runtime.settings import load_settings, plan_context


def killing_hook() -> WriteHook:
    """Counts writes and ends the process, as `kill -9` does, where KILL_AT says."""
    point_text, _, number_text = os.environ.get("KILL_AT", "").partition(":")
    file = os.environ.get("WRITES_FILE")
    count = 0

    def hook(point: WritePoint, write: Write) -> None:
        nonlocal count
        if point is WritePoint.BEFORE:
            count += 1
            if file:
                with Path(file).open("a", encoding="utf-8") as lines:
                    lines.write(f"{write.verb} {write.kind} {write.namespace}/{write.name}\n")
        if point.value == point_text and count == int(number_text):
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


if __name__ == "__main__":
    settings = load_settings()
    configure_logs(settings.log_level, settings.log_format)
    sys.exit(
        asyncio.run(
            run_operator(
                settings, plan_context(settings), watch=watch_services, hook=killing_hook()
            )
        )
    )
