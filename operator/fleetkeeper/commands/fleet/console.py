"""`fleetkeeper console`: show the fleet in a web page on loopback."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fleetkeeper.commands.fleet.top import MetricsUrl, Namespace, OperatorNamespace
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.fleet.source import FleetSource

if TYPE_CHECKING:
    from fleetkeeper.console.history import History
    from fleetkeeper.console.samples import Samples

DEADLINE_S: Final = 8.0
ANSWER_BYTES: Final = 4 * 1024 * 1024
"""A history has 13 series of 241 points, and up to 5 of decisions."""


def console(
    namespace: Namespace = None,
    operator_namespace: OperatorNamespace = "fleetkeeper-system",
    metrics: MetricsUrl = "",
    *,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1024, max=65535, help="Port on 127.0.0.1. Default: a free port."
        ),
    ] = None,
    prometheus: Annotated[
        str,
        typer.Option(
            "--prometheus",
            help="URL of the Prometheus that scrapes engines and operator, for charts of up to 24 hours. Only this command asks it, never the browser.",
        ),
    ] = "",
    interval_s: Annotated[
        float, typer.Option("--interval", min=1.0, help="Seconds between two samples.")
    ] = 5.0,
) -> None:
    """Serve a read-only web page of the fleet on 127.0.0.1, with the rights of your kubeconfig.

    Prints a link that is valid once. The page has the figures of `top` and the reasons of `explain`,
    with charts from the start of the command, or of the last 1, 6 or 24 hours with --prometheus. Ctrl-C
    stops it.

    \b
    Examples:
      fleetkeeper console
      fleetkeeper console -n team-a --port 8090
      fleetkeeper console --prometheus http://127.0.0.1:9090
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from fleetkeeper.console.samples import Sampler, Samples  # noqa: PLC0415 - only this command needs a server

    history = _history(prometheus) if prometheus else None
    samples = Samples()
    sampler = Sampler(FleetSource(operator_namespace, metrics), samples, namespace, interval_s)
    sampler.start()
    try:
        asyncio.run(_serve(samples, port or 0, history))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    except OSError as problem:
        stop(
            ExitCode.FAILED,
            f"cannot serve at 127.0.0.1:{port or 0}: {problem}; set --port to a free port",
        )
    finally:
        sampler.end()


def _history(url: str) -> History:
    from fleetkeeper.commands.fleet.prometheus_history import PrometheusHistory  # noqa: PLC0415
    from fleetkeeper.console.history import History  # noqa: PLC0415

    try:
        return History(PrometheusHistory(url, deadline_s=DEADLINE_S, answer_bytes=ANSWER_BYTES))
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="--prometheus") from None


async def _serve(samples: Samples, port: int, history: History | None) -> None:
    from fleetkeeper.console.server import LOOPBACK, serving  # noqa: PLC0415
    from fleetkeeper.console.session import Session  # noqa: PLC0415

    session = Session()
    async with serving(samples, session, port, history) as bound:
        typer.echo("Open this link once (Ctrl-C stops the console):")
        typer.echo(f"  http://{LOOPBACK}:{bound}{session.link}")
        await asyncio.Event().wait()
