"""One `up` or `down` at a time for a folder, and one node at a time for a machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetkeeper_local.errors import LocalError

MACHINE = Path("/run/fleetkeeper-local.node")
"""Names the folder of the node that runs on this machine; gone after a reboot, as the node is."""


MARKER = ".fleetkeeper-local"
"""A file that makes a folder a cluster's."""


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the folder's lock while a command works on it.

    The kernel frees it when its holder dies, however it dies: a lock file left behind is no lock.

    Raises:
        LocalError: another command holds it; the text names its process.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / "lock"
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise LocalError(
                f"another command (pid {holder}) is working on {directory}; wait for its end"
            ) from error
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def claim_folder(directory: Path) -> None:
    """Marks a new or empty folder as a cluster's; one that is marked already stays so.

    Raises:
        LocalError: it holds other things. `down` empties a cluster's folder, so it must be its own.
    """
    if not (directory / MARKER).exists():
        if directory.exists() and any(directory.iterdir()):
            raise LocalError(
                f"{directory} is not empty and no cluster's; choose a new folder with --dir"
            )
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / MARKER).touch()


def require_folder(directory: Path) -> None:
    """Returns when the folder is a cluster's.

    Raises:
        LocalError: it is not; nothing in it may be touched.
    """
    if not (directory / MARKER).exists():
        raise LocalError(f"{directory} is no cluster's folder; nothing was touched")


def claim_machine(directory: Path) -> None:
    """Notes that this folder's node runs on the machine.

    Raises:
        LocalError: another folder's does.
    """
    owner = machine_owner()
    if owner is not None and owner != directory.resolve():
        raise LocalError(
            f"a node of {owner} runs on this machine, and there can be one: cgroups, nftables and "
            f"the bridge are the machine's. Remove it first: fleetkeeper local down --dir {owner}"
        )
    if owner is None:
        MACHINE.write_text(f"{directory.resolve()}\n")


def machine_owner() -> Path | None:
    """The folder whose node runs on this machine; a note whose folder is gone counts for nothing."""
    try:
        owner = Path(MACHINE.read_text().strip())
    except FileNotFoundError:
        return None
    return owner if (owner / "run").is_dir() else None


def release_machine(directory: Path) -> None:
    """Forgets the note, if it is this folder's."""
    if machine_owner() in (None, directory.resolve()):
        MACHINE.unlink(missing_ok=True)
