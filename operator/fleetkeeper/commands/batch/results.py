"""The output and error files of a batch, written so that each is there whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from fleetkeeper.commands.batch.model import ApiError, Document
from fleetkeeper.commands.batch.progress import bytes_bar

if TYPE_CHECKING:
    from fleetkeeper.commands.batch.server import Server


class FileConflict(Exception):
    """A file that is in the way, or cannot be written. The message names it, and says what to do."""


def fetch_results(
    server: Server, batch: Document, directory: Path
) -> tuple[Path | None, Path | None]:
    """Write the output and the error file of a batch; return their paths, None where it has none.

    Files that are there already stay, so that a second call continues where the first one ended.

    Raises:
        ApiError: the server does not answer with the whole file.
        FileConflict: another file is there, or the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (
            _fetch(server, batch, "output", directory),
            _fetch(server, batch, "error", directory),
        )
    except OSError as problem:
        raise FileConflict(
            f"cannot write to {directory}: {problem.strerror or problem}; choose another with --out"
        ) from problem


def _fetch(server: Server, batch: Document, kind: str, directory: Path) -> Path | None:
    file_id = batch.get(f"{kind}_file_id")
    if not file_id:
        return None
    path = directory / f"{batch['id']}_{kind}.jsonl"
    size = server.size_of(file_id)
    if not _is_there(path, size):
        _write(server, file_id, size, path)
    return path


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


def _write(server: Server, file_id: str, size: int, path: Path) -> None:
    """Write a file beside its place, and move it once it is complete."""
    part_of_it = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part_of_it.open("xb") as file, bytes_bar() as progress:
            task = progress.add_task(path.name, total=size)
            for part in server.content(file_id):
                file.write(part)
                progress.advance(task, len(part))
            written = file.tell()
            file.flush()
            os.fsync(file.fileno())
        if written != size:
            raise ApiError(f"file {file_id}: {written} of {size} bytes came; run the command again")
        _put_in_place(part_of_it, path, size)
    finally:
        part_of_it.unlink(missing_ok=True)


def _put_in_place(written: Path, path: Path, size: int) -> None:
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
