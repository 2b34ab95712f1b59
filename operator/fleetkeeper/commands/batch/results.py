"""The output and error files of a batch, written so that each is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fleetkeeper.commands.batch.api import ApiError, BatchApi, Document


class FileConflict(Exception):
    """A file that is in the way, or cannot be written. The message names it, and says what to do."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Paths of the files of a batch; None where the batch has none."""

    output: Path | None
    error: Path | None


async def fetch_results(api: BatchApi, batch: Document, directory: Path) -> Fetched:
    """Write the files of a batch to a directory, and return their paths.

    Files that are there already stay, so that a second call continues where the first one ended.

    Raises:
        ApiError: the server does not answer with the whole file.
        FileConflict: another file is there, or the directory cannot be written.
    """
    try:
        _make(directory)
        return Fetched(
            await _fetch(api, batch, "output", directory),
            await _fetch(api, batch, "error", directory),
        )
    except OSError as problem:
        raise FileConflict(
            f"cannot write to {directory}: {problem.strerror or problem}; choose another with --out"
        ) from problem


async def _fetch(api: BatchApi, batch: Document, kind: str, directory: Path) -> Path | None:
    file_id = batch.get(f"{kind}_file_id")
    if not file_id:
        return None
    path = directory / f"{batch['id']}_{kind}.jsonl"
    size = int((await api.file(file_id))["bytes"])
    if not _is_there(path, size):
        await _write(api, file_id, size, path)
    return path


def _make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)


def _is_there(path: Path, size: int) -> bool:
    """Return whether a file is there whole.

    Raises:
        FileConflict: another file is.
    """
    if not path.exists():
        return False
    found = path.stat().st_size
    if found != size:
        raise FileConflict(
            f"{path} exists with {found} bytes, and the file of the batch has {size}; "
            "move it away, or choose another directory with --out"
        )
    return True


async def _write(api: BatchApi, file_id: str, size: int, path: Path) -> None:
    """Write a file beside its place, and rename it once it is complete."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file, _bar() as progress:
            task = progress.add_task(path.name, total=size)
            async for part in api.content(file_id):
                file.write(part)
                progress.advance(task, len(part))
            written = file.tell()
            file.flush()
            os.fsync(file.fileno())
        if written != size:
            raise ApiError(f"file {file_id}: {written} of {size} bytes came; run the command again")
        _put_in_place(Path(name), path, size)
    finally:
        _remove_if_there(Path(name))


def _put_in_place(written: Path, path: Path, size: int) -> None:
    written.chmod(0o666 & ~_umask())
    try:
        # Unlike a renaming, this replaces no file that appeared meanwhile.
        os.link(written, path)
    except FileExistsError as problem:
        if not _is_there(path, size):
            raise FileConflict(
                f"{path} is a broken link; remove it, or choose another directory with --out"
            ) from problem
    except OSError:
        # Some file systems have no links.
        if not _is_there(path, size):
            written.rename(path)


def _remove_if_there(path: Path) -> None:
    path.unlink(missing_ok=True)


def _bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def _umask() -> int:
    """Return the mask of new files; mkstemp gives them to their owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
