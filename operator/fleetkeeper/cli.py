"""The program `fleetkeeper`. Its commands are in `fleetkeeper.commands` and import heavy modules lazily."""

from __future__ import annotations

import platform
from importlib import import_module, metadata

import typer

from fleetkeeper.api.options import VLLM_VERSIONS
from fleetkeeper.api.profiles.profile import CONTRACTS
from fleetkeeper.api.schema.crd import crd_text
from fleetkeeper.commands import (
    check,
    client_keys,
    console,
    explain,
    install,
    mirror,
    render,
    run,
    signing_keys,
    simulate,
    support_bundle,
    top,
    usage,
)
from fleetkeeper.commands.batch import commands as batch
from fleetkeeper.commands.exit_codes import EPILOG, ExitCode, stop

app = typer.Typer(
    name="fleetkeeper",
    help="Run and autoscale vLLM fleets on Kubernetes. Fleetkeeper adjusts batch limits and replicas to meet objectives for queue wait and batch time, and caps memory.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command()(run.run)
app.command()(render.render)
app.command()(check.check)
app.command()(top.top)
app.command()(explain.explain)
app.command()(console.console)
app.command()(support_bundle.support_bundle)
app.command()(simulate.simulate)
app.command()(mirror.mirror)
app.command()(install.profiles_in_use)
app.command()(usage.usage)
app.add_typer(batch.app)
app.add_typer(client_keys.app)
app.add_typer(signing_keys.app, name="signing-keys")


@app.command()
def crds() -> None:
    """Print the CustomResourceDefinition.

    \b
    Examples:
      fleetkeeper crds | kubectl apply --server-side -f -
    """  # noqa: D301 - \b keeps the lines of the examples apart
    typer.echo(crd_text(), nl=False)


@app.command()
def version() -> None:
    """Print the version, and the supported versions of the engine contract and vLLM."""
    typer.echo(
        f"fleetkeeper {metadata.version('fleetkeeper')} (Python {platform.python_version()}, "
        f"engine contract {', '.join(map(str, CONTRACTS))}, vLLM {', '.join(VLLM_VERSIONS)})"
    )


def _mount_local() -> None:
    """Add `fleetkeeper local`, or a command that names the distribution to install."""
    try:
        local = import_module("fleetkeeper_local.cli")
    except ImportError as problem:
        missing = problem.name or str(problem)

        @app.command(
            "local",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            add_help_option=False,
        )
        def without_local() -> None:
            """Run a local Kubernetes cluster (not installed)."""
            stop(
                ExitCode.NOT_INSTALLED,
                f"the local cluster requires {missing}, which is not installed; run: pip install fleetkeeper-local",
            )

        return
    app.add_typer(local.app, name="local")


_mount_local()


def main() -> None:
    """Run the program."""
    app()
