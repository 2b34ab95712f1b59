"""`fleetkeeper console`: show the fleet in a web page on loopback."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from fleetkeeper.commands.exit_codes import ExitCode, stop
from fleetkeeper.commands.fleet_source import FleetSource
from fleetkeeper.commands.top import MetricsUrl, Namespace, OperatorNamespace

if TYPE_CHECKING:
    from fleetkeeper.console.samples import Samples


def console(
    namespace: Namespace = None,
    operator_namespace: OperatorNamespace = "fleetkeeper-system",
    metrics: MetricsUrl = "",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1024, max=65535, help="Port on 127.0.0.1. Default: a free port."
        ),
    ] = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=1.0, help="Seconds between two samples.")
    ] = 5.0,
) -> None:
    """Serve a read-only web page of the fleet on 127.0.0.1, with the rights of your kubeconfig.

    Prints a link that is valid once. The page has the figures of `top` and the reasons of `explain`,
    with charts from the start of the command. Ctrl-C stops it.

    \b
    Examples:
      fleetkeeper console
      fleetkeeper console -n team-a --port 8090
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from fleetkeeper.console.samples import Sampler, Samples  # noqa: PLC0415 - only this command needs a server

    samples = Samples()
    sampler = Sampler(FleetSource(operator_namespace, metrics), samples, namespace, interval_s)
    sampler.start()
    try:
        asyncio.run(_serve(samples, port or 0))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    except OSError as problem:
        stop(
            ExitCode.FAILED,
            f"cannot serve at 127.0.0.1:{port or 0}: {problem}; set --port to a free port",
        )
    finally:
        sampler.end()


async def _serve(samples: Samples, port: int) -> None:
    from fleetkeeper.console.server import LOOPBACK, serving  # noqa: PLC0415
    from fleetkeeper.console.session import Session  # noqa: PLC0415

    session = Session()
    async with serving(samples, session, port) as bound:
        typer.echo("Open this link once (Ctrl-C stops the console):")
        typer.echo(f"  http://{LOOPBACK}:{bound}{session.link}")
        await asyncio.Event().wait()
