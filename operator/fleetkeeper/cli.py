"""The command `fleetkeeper`. Each command is in `fleetkeeper.commands`; what is heavy loads late."""

from __future__ import annotations

import platform
from importlib import import_module, metadata

import typer

from fleetkeeper.api.crd import crd_text
from fleetkeeper.api.options import VLLM_VERSIONS
from fleetkeeper.api.profile import CONTRACTS
from fleetkeeper.commands import check, explain, install, render, run, top
from fleetkeeper.commands.exit_codes import EPILOG, ExitCode, stop

app = typer.Typer(
    name="fleetkeeper",
    help="Keeps fleets of vLLM on Kubernetes: live batch limits, replicas and a memory cap from queue wait and batch time.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.command()(run.run)
app.command()(render.render)
app.command()(check.check)
app.command()(top.top)
app.command()(explain.explain)
app.command()(install.keys)
app.command()(install.profiles_in_use)


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
    """Print the version, and what it works with."""
    typer.echo(
        f"fleetkeeper {metadata.version('fleetkeeper')} (Python {platform.python_version()}, "
        f"engine contract {', '.join(map(str, CONTRACTS))}, vLLM {', '.join(VLLM_VERSIONS)})"
    )


def _mount_local() -> None:
    """`fleetkeeper local`: a real cluster on this machine; its dependencies are an extra."""
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
            """Run a real cluster on this machine (not installed here)."""
            stop(
                ExitCode.NOT_INSTALLED,
                f"the local cluster needs {missing}, which is not installed: pip install 'fleetkeeper[local]'",
            )

        return
    app.add_typer(local.app, name="local")


_mount_local()


def main() -> None:
    """The entry point of the program."""
    app()
