"""The program `fleetkeeper`. The module of a command is imported when the command is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from fleetkeeper.exit_codes import EPILOG, ExitCode, stop

LOCAL: Final = "local"
"""Module of a distribution that imports this one. The table names it by text, because it may be missing."""
COMMANDS: Final[Mapping[str, str]] = {
    "run": "fleetkeeper.commands.run:run",
    "render": "fleetkeeper.commands.service.render:render",
    "check": "fleetkeeper.commands.service.check:check",
    "top": "fleetkeeper.commands.fleet.top:top",
    "explain": "fleetkeeper.commands.fleet.explain:explain",
    "wake": "fleetkeeper.commands.fleet.wake:wake",
    "console": "fleetkeeper.commands.fleet.console:console",
    "support-bundle": "fleetkeeper.commands.bundle.command:support_bundle",
    "simulate": "fleetkeeper.commands.simulate.command:simulate",
    "simulate-pool": "fleetkeeper.commands.simulate.pool:simulate_pool",
    "mirror": "fleetkeeper.commands.mirror:mirror",
    "profiles-in-use": "fleetkeeper.commands.install:profiles_in_use",
    "usage": "fleetkeeper.commands.keys.usage:usage",
    "crds": "fleetkeeper.commands.about:crds",
    "version": "fleetkeeper.commands.about:version",
    "batch": "fleetkeeper.commands.batch.commands:app",
    "keys": "fleetkeeper.commands.keys.client_keys:app",
    "signing-keys": "fleetkeeper.commands.keys.signing_keys:app",
    LOCAL: "fleetkeeper_local.cli:app",
}
"""Where each command is: a function, or an application with commands of its own."""


class Commands(TyperGroup):
    """A group that knows its commands by name, and imports each one when it is asked for."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - of typer
        """Take the names from the table."""
        names: Any = dict.fromkeys(COMMANDS)
        super().__init__(**{**settings, "commands": names})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401, ARG002 - typer exports no class
        """Return a command, or None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        parent = typer.Typer()
        try:
            found = getattr(import_module(module), name)
        except ImportError as problem:
            if cmd_name != LOCAL:
                raise
            _add_not_installed(parent, problem.name or str(problem))
        else:
            if isinstance(found, typer.Typer):
                parent.add_typer(found, name=cmd_name)
            else:
                parent.command(cmd_name)(found)
        return typer.main.get_group(parent).commands[cmd_name]


def _add_not_installed(parent: typer.Typer, missing: str) -> None:
    @parent.command(
        LOCAL,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    def without_local() -> None:
        """Run a local Kubernetes cluster (not installed)."""
        stop(
            ExitCode.NOT_INSTALLED,
            f"the local cluster requires {missing}, which is not installed; run: pip install fleetkeeper-local",
        )


app = typer.Typer(
    name="fleetkeeper",
    cls=Commands,
    help="Run and autoscale vLLM fleets on Kubernetes. Fleetkeeper adjusts batch limits and replicas to meet objectives for queue wait and batch time, and caps memory.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _group() -> None:
    """Make a group of an application without commands of its own."""


def main() -> None:
    """Run the program."""
    app()
