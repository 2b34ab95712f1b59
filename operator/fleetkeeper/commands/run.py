"""`fleetkeeper run`: run the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetkeeper.exit_codes import ExitCode, stop


def run(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Settings file (YAML). Default: the file in FLEETKEEPER_CONFIG. FLEETKEEPER_* variables override it.",
        ),
    ] = None,
) -> None:
    """Run the operator until SIGTERM.

    The exit code is 0 after SIGTERM, 1 if the operator lost its Lease or a watch (restart it), and 2
    if it cannot run at all (credentials, permissions).

    \b
    Examples:
      fleetkeeper run
      KUBECONFIG=~/.kube/config fleetkeeper run --config settings.yaml
    """  # noqa: D301 - \b keeps the lines of the examples apart
    import asyncio  # noqa: PLC0415 - heavy, as the following; only this command needs them

    from fleetkeeper.events import watch_services  # noqa: PLC0415
    from fleetkeeper.runtime.main import run_operator  # noqa: PLC0415
    from fleetkeeper.runtime.plan_context import plan_context  # noqa: PLC0415
    from fleetkeeper.runtime.settings import SettingsError, load_settings  # noqa: PLC0415
    from fleetkeeper.runtime.telemetry.logs import configure_logs  # noqa: PLC0415

    try:
        settings = load_settings(config)
        context = plan_context(settings)
    except SettingsError as problem:
        stop(ExitCode.BAD_INPUT, str(problem))
    configure_logs(settings.log_level, settings.log_format)
    raise typer.Exit(asyncio.run(run_operator(settings, context, watch=watch_services)))
