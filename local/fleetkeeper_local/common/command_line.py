"""The option of the data directory, and errors as one message with exit code 1, for every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import data_dir

T = TypeVar("T")

Dir = Annotated[
    Path,
    typer.Option(
        "--dir", help="Data directory.", default_factory=data_dir, show_default="~/.local/…"
    ),
]


def orderly(work: Callable[[], T]) -> T:
    """Run the work; turn an error that the user can fix into one message and exit code 1."""
    try:
        return work()
    except LocalError as error:
        raise failure(str(error)) from error
    except PermissionError as error:
        raise failure(f"{error}; run the command as the user who started the cluster") from error


def failure(text: str) -> typer.Exit:
    """Print the message; return the exit to raise."""
    typer.echo(f"fleetkeeper local: {text}", err=True)
    return typer.Exit(1)
