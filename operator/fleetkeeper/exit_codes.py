"""The exit codes. `fleetkeeper --help` shows them, and scripts may rely on them."""

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
    NOT_YET = 75


MEANING = {
    ExitCode.OK: "success",
    ExitCode.FAILED: "failure (the last line of output names the cause)",
    ExitCode.USAGE: "invalid command-line arguments",
    ExitCode.BAD_INPUT: "a file has invalid content, or a service that does not fit the hardware",
    ExitCode.NO_INPUT: "a file cannot be read or contains no InferenceService",
    ExitCode.NOT_INSTALLED: "a required part of Fleetkeeper is not installed",
    ExitCode.NOT_YET: "a batch has not ended yet: try again later",
}
EPILOG = "Exit codes: " + "; ".join(f"{code.value} {text}" for code, text in MEANING.items()) + "."


def stop(code: ExitCode, message: str) -> NoReturn:
    """Print one line to standard error and exit the command."""
    typer.echo(message, err=True)
    raise typer.Exit(code.value)
