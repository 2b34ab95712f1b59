"""What a person who reads the operator's log is spared."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import logging
from fleetkeeper.runtime.telemetry.logs import configure_logs
configure_logs("info", "json")
pool = logging.getLogger("urllib3.connectionpool")
pool.warning("Retrying after connection broken")
pool.error("gave up")
logging.getLogger("aiohttp").info("a request")
logging.getLogger("aiohttp").warning("odd")
logging.getLogger("fleetkeeper").info("said")
"""


def test_retries_of_queries_are_not_told_one_by_one() -> None:
    """A stopped Prometheus is told once, not twenty lines a tick; libraries are heard from warnings on."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    told = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert told == ["gave up", "odd", "said"]
