"""What a person who reads the operator's log is spared."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import logging
from fleetkeeper.runtime.telemetry.logs import configure_logs
configure_logs("info", "json")
logging.getLogger("aiohttp").info("a request")
logging.getLogger("aiohttp").warning("odd")
logging.getLogger("fleetkeeper").info("said")
"""


def test_libraries_are_heard_from_warnings_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    told = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert told == ["odd", "said"]
