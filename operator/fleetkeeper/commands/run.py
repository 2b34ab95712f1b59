"""`fleetkeeper run`: the operator itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fleetkeeper.commands.exit_codes import ExitCode, stop


def run(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="The settings file (YAML). Absent: the one that FLEETKEEPER_CONFIG names. FLEETKEEPER_* variables go before it.",
        ),
    ] = None,
) -> None:
    """Run the operator, until SIGTERM.

    Ends with 0 after SIGTERM, with 1 when it lost the lease or a watch (start it again), and with 2
    when it could never have run (credentials, rights).

    \b
    Examples:
      fleetkeeper run
      KUBECONFIG=~/.kube/config fleetkeeper run --config settings.yaml
    """  # noqa: D301 - \b keeps the lines of the examples apart
    import asyncio  # noqa: PLC0415 - only this command needs what follows, and it is heavy

    from fleetkeeper.events import watch_services  # noqa: PLC0415
    from fleetkeeper.runtime.logs import configure_logs  # noqa: PLC0415
    from fleetkeeper.runtime.main import run_operator  # noqa: PLC0415
    from fleetkeeper.runtime.settings import (  # noqa: PLC0415
        SettingsError,
        load_settings,
        plan_context,
    )

    try:
        settings = load_settings(config)
        context = plan_context(settings)
    except SettingsError as problem:
        stop(ExitCode.BAD_INPUT, str(problem))
    configure_logs(settings.log_level, settings.log_format)
    raise typer.Exit(asyncio.run(run_operator(settings, context, watch=watch_services)))
