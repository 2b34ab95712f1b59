"""How a command ends. `fleetkeeper --help` shows this table, and scripts may rely on it."""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

import typer


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    BAD_INPUT = 64
    NO_INPUT = 66
    NOT_INSTALLED = 69


MEANING = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "failed; the last line says why",
    ExitCode.USAGE: "wrong use of the command line",
    ExitCode.BAD_INPUT: "a file holds something that would be refused",
    ExitCode.NO_INPUT: "a file cannot be read, or holds no InferenceService",
    ExitCode.NOT_INSTALLED: "a part of Fleetkeeper that is needed is not installed",
}
EPILOG = "Exit codes: " + "; ".join(f"{code.value} {text}" for code, text in MEANING.items()) + "."


def stop(code: ExitCode, message: str) -> NoReturn:
    """Ends the command with one line on standard error."""
    typer.echo(message, err=True)
    raise typer.Exit(code.value)
