"""Locks: one `up` or `down` at a time per data directory, and one node at a time per machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError

MACHINE = Path("/run/fleetkeeper-local.node")
"""Names the directory of the node that runs on this machine; a reboot removes both."""


MARKER = ".fleetkeeper-local"
"""A file that marks a cluster's data directory."""


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold the directory's lock while a command works on it.

    The kernel releases the lock when its holder dies, so a lock file left behind locks nothing.

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
                f"another command (pid {holder}) is working on {directory}; wait until it ends"
            ) from error
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def claim_folder(directory: Path) -> None:
    """Mark a new or empty directory as a cluster's; leave a marked one as it is.

    Raises:
        LocalError: it holds other files. `down` empties the directory, so it must be the cluster's
            own.
    """
    if not (directory / MARKER).exists():
        if directory.exists() and any(directory.iterdir()):
            raise LocalError(
                f"{directory} is not empty and not a cluster's data directory; choose another one with --dir"
            )
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / MARKER).touch()


def require_folder(directory: Path) -> None:
    """Return if the directory is a cluster's.

    Raises:
        LocalError: it is not; nothing in it may be changed.
    """
    if not (directory / MARKER).exists():
        raise LocalError(f"{directory} is not a cluster's data directory; nothing was changed")


def claim_machine(directory: Path) -> None:
    """Record that this directory's node runs on the machine.

    Raises:
        LocalError: the node of another directory runs.
    """
    owner = machine_owner()
    if owner is not None and owner != directory.resolve():
        raise LocalError(
            f"the node of {owner} runs on this machine. Only one can run, because nodes share cgroups, "
            f"nftables and the bridge. Remove it first: fleetkeeper local down --dir {owner}"
        )
    if owner is None:
        MACHINE.write_text(f"{directory.resolve()}\n")


def machine_owner() -> Path | None:
    """Return the directory whose node runs on this machine; None if it no longer exists."""
    try:
        owner = Path(MACHINE.read_text().strip())
    except FileNotFoundError:
        return None
    return owner if (owner / "run").is_dir() else None


def release_machine(directory: Path) -> None:
    """Remove the record if it is this directory's."""
    if machine_owner() in (None, directory.resolve()):
        MACHINE.unlink(missing_ok=True)
