"""The files with usage, one for each hour, and the cursors of the pods.

A page's lines and its cursor are one group, appended with one write. After a crash both exist, or
neither; then the page is read again. A file begins with all cursors, so the newest file with a group is
enough to restore them. Files of past hours are replaced by their sums, atomically. So a crash at any
moment makes no request count twice or not at all (the format: fleetkeeper_contract.usage_files).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog

from fleetkeeper_contract.usage_files import (
    HOUR_S,
    Report,
    committed,
    file_of,
    hour_of,
    hours_of_files,
    lines_of,
    parse_hour,
)
from fleetkeeper_gateway.usage.attempts import Attempts
from fleetkeeper_gateway.usage.bounds import HourBounds
from fleetkeeper_gateway.usage.lines import Pod, Reading, encode, read_page, summed
from fleetkeeper_gateway.usage.pages import Cursor, Page

log = structlog.get_logger(__name__)

RAW_HOURS: Final = 3
"""Hours whose files keep each attempt, including the current hour."""
FORGET_S: Final = 7 * 86_400.0
"""Time after the last reading of a pod for which its cursor is kept."""
DRAFT: Final = ".draft"


class UsageStore:
    """The files of one directory. Only one process may write there."""

    def __init__(self, directory: Path, retention_days: int) -> None:
        self._directory = directory
        self._retention_s = retention_days * 86_400.0
        self._cursors: dict[str, Cursor] = {}
        self._attempts = Attempts()
        self._bounds = HourBounds()
        self._file: BinaryIO | None = None
        self._closing = threading.Lock()
        """Held while the file is synced, from a thread, and while it is closed."""
        self._hour = ""
        self._newest = ""
        self._size = 0
        self._summed: set[str] = set()
        self._alive: dict[str, float] = {}
        """Time of each pod's last reading or restoration."""

    def open(self, now: float) -> None:
        """Restore the state from the files. Call it once, before all other methods.

        Raises:
            OSError: the directory cannot be created, read or written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for draft in self._directory.glob(f"*{DRAFT}"):
            draft.unlink()
        hours = self._hours()
        for hour in reversed(hours):
            if self._restore_cursors(hour):
                break
        self._newest = hours[-1] if hours else ""
        self._alive = dict.fromkeys(self._cursors, now)
        for hour in hours[-RAW_HOURS:]:
            if parse_hour(hour) > now - RAW_HOURS * HOUR_S:
                self._restore_lines(hour)
        if hours:
            # The current file takes long to read, so it is read here and not on the event loop at the first page.
            self._start(hours[-1])

    def is_used_up(self, namespace: str) -> bool:
        """Return whether the pods of a namespace must be read less often in this hour."""
        return self._bounds.is_used_up(namespace)

    def cursor(self, pod: str) -> Cursor:
        """Return the place up to which a pod was read."""
        return self._cursors.get(pod) or Cursor(pod)

    def append(self, page: Page, pod: Pod, now: float) -> Reading:
        """Append the lines and the cursor of a page. After a failure nothing of it counts; read the page again.

        Raises:
            OSError: the file cannot be written.
        """
        cursor = self.cursor(pod.uid)
        # After a clock is set back, the newest file must stay the one with the newest cursors.
        hour = max(hour_of(now), self._newest)
        self._bounds.begin(hour)
        room = self._bounds.room(pod)
        reading = read_page(page, cursor, pod, now, self._attempts.__contains__, room=room)
        self._alive[pod.uid] = now
        changed = (reading.cursor.next, reading.cursor.boot) != (cursor.next, cursor.boot)
        if changed or reading.lines:
            self._write(reading, hour, now)
            self._bounds.note(pod.namespace, reading.lines)
        self._cursors[pod.uid] = reading.cursor
        self._attempts.add(str(entry.attempt) for entry in reading.attributed)
        return reading

    def sync(self) -> None:
        """Sync the appended lines to disk.

        Raises:
            OSError: the disk failed.
        """
        with self._closing:
            if self._file is not None:
                os.fsync(self._file.fileno())

    def tidy(self, now: float) -> None:
        """Replace past files by their sums, and delete those beyond the retention.

        After a failure the other files are still processed.

        Raises:
            OSError: a file cannot be replaced or deleted.
            ValueError: a file has a line that is not usage.
        """
        problems = []
        for hour in self._hours():
            if hour == self._newest:
                continue  # it has the cursors, and may be open
            try:
                self._tidy_hour(hour, now)
            except (OSError, ValueError) as problem:
                problems.append(problem)
        if problems:
            raise problems[0]

    def report(self, since: float, until: float, by: tuple[str, ...]) -> Report:
        """Return the usage of a period.

        Raises:
            OSError: a file cannot be read.
        """
        found = Report(since, until, by)
        for hour in self._hours():
            # A file has lines of its hour, and of earlier hours that were read late.
            if parse_hour(hour) > since - HOUR_S:
                with suppress(FileNotFoundError), self._path(hour).open("rb") as file:
                    for line in lines_of(file):
                        found.add(line)
        return found

    def close(self) -> None:
        """Close the file."""
        with self._closing:
            if self._file is not None:
                os.fsync(self._file.fileno())
                self._file.close()
                self._file = None

    def _tidy_hour(self, hour: str, now: float) -> None:
        begin = parse_hour(hour)
        if begin < now - self._retention_s:
            self._path(hour).unlink()
            self._summed.discard(hour)
        elif begin <= now - RAW_HOURS * HOUR_S and hour not in self._summed:
            self._sum_up(hour)
            self._summed.add(hour)

    def _hours(self) -> list[str]:
        return hours_of_files(path.name for path in self._directory.iterdir())

    def _path(self, hour: str) -> Path:
        return self._directory / file_of(hour)

    def _groups(self, hour: str) -> Iterator[tuple[list[dict[str, Any]], int]]:
        with self._path(hour).open("rb") as file:
            yield from committed(file)

    def _restore_cursors(self, hour: str) -> bool:
        found = False
        for group, _ in self._groups(hour):
            found = True
            for document in group[-1]["cursors"]:
                cursor = Cursor.of_document(document)
                self._cursors[cursor.pod] = cursor
        return found

    def _restore_lines(self, hour: str) -> None:
        self._bounds.begin(hour)
        for group, _ in self._groups(hour):
            self._attempts.add(line["attempt"] for line in group if "attempt" in line)
            if len(group) > 1:  # all lines of a group are of one pod
                self._bounds.note(str(group[0]["namespace"]), group[:-1])

    def _write(self, reading: Reading, hour: str, now: float) -> None:
        if self._file is None or hour != self._hour:
            self._start(hour)
        assert self._file is not None  # noqa: S101 - started above
        cursors = [reading.cursor] if self._size else self._all_cursors(reading.cursor, now)
        group = encode(reading.lines, cursors)
        try:
            _write_whole(self._file, group)
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(group)

    def _all_cursors(self, changed: Cursor, now: float) -> list[Cursor]:
        self._cursors = {
            pod: cursor
            for pod, cursor in self._cursors.items()
            if self._alive[pod] > now - FORGET_S
        }
        cursors = {**self._cursors, changed.pod: changed}
        self._alive = {pod: self._alive[pod] for pod in cursors}
        return list(cursors.values())

    def _start(self, hour: str) -> None:
        """Open an hour's file, and truncate it after its last commit."""
        self.close()
        path = self._path(hour)
        file = path.open("ab", buffering=0)
        try:
            size = max((end for _, end in self._groups(hour)), default=0)
            if size != path.stat().st_size:
                log.warning("usage file cut to its last commit", file=path.name, bytes=size)
                os.ftruncate(file.fileno(), size)
        except BaseException:
            file.close()
            raise
        self._file, self._hour, self._newest, self._size = file, hour, hour, size

    def _sum_up(self, hour: str) -> None:
        cursors: dict[str, Cursor] = {}
        groups = 0

        def lines() -> Iterator[dict[str, Any]]:
            nonlocal groups
            for group, _ in self._groups(hour):
                groups += 1
                yield from group[:-1]
                for document in group[-1]["cursors"]:
                    cursor = Cursor.of_document(document)
                    cursors[cursor.pod] = cursor

        sums = summed(lines())
        if groups == 1 and not self._has_attempts(hour):
            return  # it was replaced before
        path = self._path(hour)
        draft = path.with_name(path.name + DRAFT)
        with draft.open("wb") as file:
            file.write(encode(sums, cursors.values()) if groups else b"")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def _has_attempts(self, hour: str) -> bool:
        return any("attempt" in line for group, _ in self._groups(hour) for line in group)


def _write_whole(file: BinaryIO, data: bytes) -> None:
    written = os.write(file.fileno(), data)
    if written != len(data):
        raise OSError(f"{file.name}: {written} of {len(data)} bytes were written; the disk is full")
