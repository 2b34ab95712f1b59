"""The commands `fleetkeeper batch submit`, `status`, `cancel` and `fetch`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
from fleetkeeper.commands.exit_codes import EPILOG, ExitCode, stop

Document = dict[str, Any]
Result = TypeVar("Result")

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
    pairs = pairs_of(metadata or [])
    where = checked_url(url)
    key = client_key()
    check_input(file, endpoint)
    body: Document = {"endpoint": endpoint, "completion_window": window}
    if pairs:
        body["metadata"] = pairs

    async def submitted() -> Document:
        from fleetkeeper.commands.batch.api import batch_api  # noqa: PLC0415 - takes 0.3 s
        from fleetkeeper.commands.batch.progress import until_ended, upload_bar  # noqa: PLC0415

        async with batch_api(where, key) as api:
            with upload_bar(file.stat().st_size) as on_bytes:
                uploaded = await api.upload(file, on_bytes)
            batch = await _created(api, {"input_file_id": uploaded["id"], **body})
            if not wait:
                return batch
            typer.echo(f"created {batch['id']}", err=True)
            return await until_ended(api, batch, interval)

    batch = _run(submitted())
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
    where, key = checked_url(url), client_key()
    if batch_id is None:
        _show_list(_run(_listed(where, key, limit)), as_json=as_json)
        return
    check_id(batch_id)

    async def asked() -> Document:
        from fleetkeeper.commands.batch.api import batch_api  # noqa: PLC0415
        from fleetkeeper.commands.batch.progress import until_ended  # noqa: PLC0415

        async with batch_api(where, key) as api:
            batch = await api.get(batch_id)
            return await until_ended(api, batch, interval) if watch else batch

    batch = _run(asked())
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
    where, key = checked_url(url), client_key()
    check_id(batch_id)

    async def cancelled() -> Document:
        from fleetkeeper.commands.batch.api import batch_api  # noqa: PLC0415

        async with batch_api(where, key) as api:
            return await api.cancel(batch_id)

    batch = _run(cancelled())
    _show(batch, as_json=as_json)


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
    where, key = checked_url(url), client_key()
    check_id(batch_id)

    async def fetched() -> tuple[Path | None, Path | None]:
        from fleetkeeper.commands.batch.api import batch_api  # noqa: PLC0415
        from fleetkeeper.commands.batch.progress import ENDED  # noqa: PLC0415
        from fleetkeeper.commands.batch.results import FileConflict, fetch_results  # noqa: PLC0415

        async with batch_api(where, key) as api:
            batch = await api.get(batch_id)
            if batch["status"] not in ENDED:
                stop(
                    ExitCode.NOT_YET,
                    f"{batch_id} is {batch['status']}, and has its files when it has ended; "
                    f"wait for it: fleetkeeper batch status {batch_id} --watch",
                )
            if batch["status"] == "failed":
                _judge(batch)
            try:
                found = await fetch_results(api, batch, out)
            except FileConflict as problem:
                stop(ExitCode.FAILED, str(problem))
            return found.output, found.error

    output, error = _run(fetched())
    if as_json:
        named = {"output_file": output, "error_file": error}
        typer.echo(json.dumps({k: None if v is None else str(v) for k, v in named.items()}))
        return
    for path in (output, error):
        if path is not None:
            typer.echo(str(path))


async def _listed(url: str, key: str, limit: int) -> list[Document]:
    from fleetkeeper.commands.batch.api import batch_api  # noqa: PLC0415

    async with batch_api(url, key) as api:
        return await api.list(limit)


async def _created(api: Any, body: Document) -> Document:  # noqa: ANN401 - BatchApi is imported late
    """Create a batch; if the server refuses, delete the input file, which counts to the key's quota."""
    from fleetkeeper.commands.batch.api import ApiError  # noqa: PLC0415

    file_id = body["input_file_id"]
    try:
        created: Document = await api.create(body)
    except ApiError as problem:
        if (
            problem.status < HTTPStatus.BAD_REQUEST
            or problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        ):
            raise ApiError(
                f"{problem}; the input file is uploaded as {file_id}, and the batch may exist: "
                "see `fleetkeeper batch status`",
                status=problem.status,
            ) from problem
        try:
            await api.delete_file(file_id)
        except ApiError as left:
            raise ApiError(f"{problem}; the input file {file_id} stays: {left}") from problem
        raise
    return created


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    from fleetkeeper.commands.batch.api import ApiError  # noqa: PLC0415

    try:
        return asyncio.run(work)
    except ApiError as problem:
        stop(ExitCode.FAILED, str(problem))


def _judge(batch: Document, *, shown: bool = False) -> None:
    """Exit with the code of how a batch ended, with its mistakes unless they were shown."""
    from fleetkeeper.commands.batch.view import mistakes_of  # noqa: PLC0415

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
    from fleetkeeper.commands.batch.view import batch_lines  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps(batch, indent=2))
    else:
        typer.echo("\n".join(batch_lines(batch, time.time())))


def _show_list(batches: Sequence[Document], *, as_json: bool) -> None:
    from fleetkeeper.commands.batch.view import print_batches  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps(batches, indent=2))
    elif batches:
        print_batches(batches)
    else:
        typer.echo("this key has no batches", err=True)
