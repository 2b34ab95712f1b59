"""The processes of the gateway, each with a Deployment of its own.

    fleetkeeper-gateway serve    # the request path
    fleetkeeper-gateway usage    # collects what the engines counted
    fleetkeeper-gateway batch    # work that may wait: OpenAI's Batch API

Settings come from environment variables (docs/reference/gateway-settings.md).
"""

from __future__ import annotations

import argparse
import importlib
import sys

PROCESSES = {
    "serve": ("fleetkeeper_gateway.serve", "serve requests"),
    "usage": ("fleetkeeper_gateway.usage.process", "collect usage from the engines"),
    "batch": ("fleetkeeper_gateway.batch.process", "run files of requests"),
}
"""Module with `main() -> int`, and a description."""


def main() -> None:
    """Run the process that the arguments name."""
    parser = argparse.ArgumentParser(prog="fleetkeeper-gateway")
    commands = parser.add_subparsers(dest="process", required=True)
    for name, (_, description) in PROCESSES.items():
        commands.add_parser(name, help=description, description=description)
    module, _ = PROCESSES[parser.parse_args().process]
    # Imported here: a process loads no library of another one.
    sys.exit(importlib.import_module(module).main())
