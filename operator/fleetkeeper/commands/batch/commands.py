"""The commands `fleetkeeper batch submit`, `status`, `cancel` and `fetch`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetkeeper.commands.batch.arguments import (
    KEY_VARIABLE,
    AsJson,
    BatchId,
    Interval,
    Url,
    check_id,
    check_input,
    checked_url,
    client_key,
    pairs_of,
)
from fleetkeeper.commands.batch.model import ENDED, ApiError, Document
from fleetkeeper.commands.batch.progress import until_ended, uploading
from fleetkeeper.commands.batch.results import FileConflict, fetch_results
from fleetkeeper.commands.batch.view import batch_lines, mistakes_of, print_batches
from fleetkeeper.exit_codes import EPILOG, ExitCode, stop

if TYPE_CHECKING:
    from fleetkeeper.commands.batch.server import Server

app = typer.Typer(
    name="batch",
    help=f"Run files of requests that may wait, by OpenAI's Batch API. The key of the client is in the variable {KEY_VARIABLE}.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def submit(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSONL file: one request with a custom_id a line."),
    ],
    *,
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="Path of all requests.")
    ] = "/v1/chat/completions",
    window: Annotated[
        str, typer.Option("--window", help="Time in which the batch must end, such as 24h.")
    ] = "24h",
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", help="Text to keep with the batch: KEY=VALUE. May be repeated."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the batch has ended. Ctrl-C ends only this.")
    ] = False,
    interval: Interval = 5.0,
    url: Url = "",
    as_json: AsJson = False,
) -> None:
    """Check a file, upload it, create a batch, and print its ID.

    The check finds what the server would refuse, with line numbers, before anything is sent. With
    --wait the exit code is 0 if the batch is completed, also if some of its lines failed.

    \b
    Examples:
      fleetkeeper batch submit requests.jsonl
      fleetkeeper batch submit requests.jsonl --window 4h --metadata job=nightly --wait
      ID=$(fleetkeeper batch submit requests.jsonl) && fleetkeeper batch status $ID --watch
    """  # noqa: D301 - \b keeps the lines of the examples apart
    settings: Document = {"endpoint": endpoint, "completion_window": window}
    if metadata:
        settings["metadata"] = pairs_of(metadata)
    with _server(url) as server:
        check_input(file, endpoint)
        try:
            with uploading(file) as content:
                uploaded = server.upload(file.name, content)
        except OSError as problem:
            stop(ExitCode.FAILED, f"cannot read {file}: {problem.strerror or problem}")
        batch = server.submit(uploaded["id"], settings)
        if wait:
            typer.echo(f"created {batch['id']}", err=True)
            batch = until_ended(server, batch, interval)
    typer.echo(json.dumps(batch, indent=2) if as_json else batch["id"])
    if wait:
        _judge(batch)


@app.command()
def status(
    batch_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="ID of a batch. Default: list the newest.")
    ] = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show progress until the batch has ended.")
    ] = False,
    interval: Interval = 5.0,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Batches to list.")] = 20,
    url: Url = "",
    as_json: AsJson = False,
) -> None:
    """Show a batch, or list the newest batches of the key.

    With --watch, a bar on standard error shows the lines, the failed ones, the rate and an estimate of
    the end. Then the exit code is 0 if the batch is completed, and 1 if it failed, expired or was
    cancelled.

    \b
    Examples:
      fleetkeeper batch status
      fleetkeeper batch status batch_6f0d --watch
      fleetkeeper batch status batch_6f0d --json | jq .request_counts
    """  # noqa: D301 - \b keeps the lines of the examples apart
    if watch and batch_id is None:
        stop(
            ExitCode.USAGE, "--watch needs the ID of a batch; `fleetkeeper batch status` lists them"
        )
    with _server(url) as server:
        if batch_id is None:
            _show_list(server.list(limit), as_json=as_json)
            return
        check_id(batch_id)
        batch = server.get(batch_id)
        if watch:
            batch = until_ended(server, batch, interval)
    _show(batch, as_json=as_json)
    if watch:
        _judge(batch, shown=not as_json)


@app.command()
def cancel(batch_id: BatchId, *, url: Url = "", as_json: AsJson = False) -> None:
    """Cancel a batch. Lines that have a result keep it, and the others get the error batch_cancelled.

    \b
    Examples:
      fleetkeeper batch cancel batch_6f0d
    """  # noqa: D301 - \b keeps the lines of the examples apart
    check_id(batch_id)
    with _server(url) as server:
        _show(server.cancel(batch_id), as_json=as_json)


@app.command()
def fetch(
    batch_id: BatchId,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Directory to write to. It is created if necessary.")
    ] = Path(),
    url: Url = "",
    as_json: AsJson = False,
) -> None:
    """Write the results of a batch that has ended: ID_output.jsonl and ID_error.jsonl.

    It prints the path of each file that the batch has. Together they have every line once. A file
    that is there whole is not fetched again, and none is overwritten, so the command can be
    repeated after a failure.

    \b
    Examples:
      fleetkeeper batch fetch batch_6f0d -o results
    """  # noqa: D301 - \b keeps the lines of the examples apart
    check_id(batch_id)
    with _server(url) as server:
        batch = server.get(batch_id)
        if batch["status"] not in ENDED:
            stop(
                ExitCode.NOT_YET,
                f"{batch_id} is {batch['status']}, and has its files when it has ended; "
                f"wait for it: fleetkeeper batch status {batch_id} --watch",
            )
        if batch["status"] == "failed":
            _judge(batch)
        try:
            output, error = fetch_results(server, batch, out)
        except FileConflict as problem:
            stop(ExitCode.FAILED, str(problem))
    if as_json:
        named = {"output_file": output, "error_file": error}
        typer.echo(json.dumps({k: None if v is None else str(v) for k, v in named.items()}))
        return
    for path in (output, error):
        if path is not None:
            typer.echo(str(path))


@contextmanager
def _server(url: str) -> Iterator[Server]:
    """Provide the server; exit the command if its client is not installed, or a request fails."""
    where, key = checked_url(url), client_key()
    try:
        from fleetkeeper.commands.batch.server import connected  # noqa: PLC0415 - an extra, takes 1 s
    except ImportError as problem:
        stop(
            ExitCode.NOT_INSTALLED,
            f"batches require {problem.name}, which is not installed; run: pip install 'fleetkeeper[batch]'",
        )
    try:
        with connected(where, key) as server:
            yield server
    except ApiError as problem:
        stop(ExitCode.FAILED, str(problem))


def _judge(batch: Document, *, shown: bool = False) -> None:
    """Exit with the code of how a batch ended, with its mistakes unless they were shown."""
    if batch["status"] == "completed":
        return
    for mistake in [] if shown else mistakes_of(batch):
        typer.echo(mistake, err=True)
    todo = {
        "failed": "correct the input file, and submit it again",
        "expired": f"its lines with a result are there: fleetkeeper batch fetch {batch['id']}",
        "cancelled": f"its lines with a result are there: fleetkeeper batch fetch {batch['id']}",
    }[batch["status"]]
    stop(ExitCode.FAILED, f"{batch['id']} is {batch['status']}; {todo}")


def _show(batch: Document, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(batch, indent=2))
    else:
        typer.echo("\n".join(batch_lines(batch, time.time())))


def _show_list(batches: list[Document], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(batches, indent=2))
    elif batches:
        print_batches(batches)
    else:
        typer.echo("this key has no batches", err=True)
