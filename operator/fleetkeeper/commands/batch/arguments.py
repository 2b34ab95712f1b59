"""Options that the commands share, and the checks of what was given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from fleetkeeper.commands.batch.input_file import UnreadableInput, check_file
from fleetkeeper.commands.batch.model import ID
from fleetkeeper.exit_codes import ExitCode, stop

KEY_VARIABLE: Final = "FLEETKEEPER_API_KEY"
URL_VARIABLE: Final = "FLEETKEEPER_URL"

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        help="URL that leads to /v1/batches: of your Gateway, or of the batch Service. Default: the variable FLEETKEEPER_URL.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the API answers, as JSON.")]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="ID of the batch.")]
Interval = Annotated[
    float, typer.Option("--interval", min=0.1, help="Seconds between two questions.")
]


def check_input(file: Path, endpoint: str) -> None:
    """Exit the command if a file has a mistake for which the server would refuse it."""
    try:
        found = check_file(file, endpoint)
    except UnreadableInput as problem:
        stop(ExitCode.NO_INPUT, str(problem))
    if not found.wrong:
        return
    for mistake in found.mistakes:
        typer.echo(mistake, err=True)
    more = found.wrong - len(found.mistakes)
    rest = f", of which {more} are not shown" if more else ""
    stop(ExitCode.BAD_INPUT, f"{found.wrong} mistakes{rest}; nothing was uploaded")


def check_id(batch_id: str) -> None:
    """Exit the command if a text is no ID."""
    if not ID.fullmatch(batch_id):
        stop(
            ExitCode.USAGE,
            f"{batch_id!r} is no ID of a batch; `fleetkeeper batch status` lists them",
        )


def checked_url(url: str) -> str:
    """Return the URL; exit the command if it is none."""
    if not url.startswith(("http://", "https://")):
        what = f"--url is {url!r}" if url else f"--url and {URL_VARIABLE} are not set"
        stop(
            ExitCode.USAGE, f"{what}; set the URL of the batch API, such as https://llm.example.com"
        )
    return url


def client_key() -> str:
    """Return the key; exit the command without one."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        stop(
            ExitCode.USAGE,
            f"{KEY_VARIABLE} has characters that no key has; set it to the key alone",
        )
    if not key:
        stop(ExitCode.USAGE, f"{KEY_VARIABLE} is not set; set it to the key of the client")
    return key


def pairs_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the metadata; exit the command if a text is not KEY=VALUE."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            stop(ExitCode.USAGE, f"--metadata is {text!r}; it must be KEY=VALUE")
        pairs[name] = value
    return pairs
