"""The archive of a support bundle: redacted entries within bounds, and an index of what is missing."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from fleetkeeper.commands.bundle.redaction import redact, redact_text

ROOT: Final = "fleetkeeper-support"
BUNDLE_BYTES: Final = 20 * 1024 * 1024
"""The bound of all entries before compression."""
INDEX_BYTES: Final = 1024 * 1024
"""The part of it that is kept for the index."""
MAX_NOTES: Final = 2000
"""The most entries of a list in the index."""
TEXT_BYTES: Final = 256 * 1024
"""The bound of a log."""


class Archive:
    """Entries in memory. Each is redacted here, so that none gets into the file as it was read."""

    def __init__(self, limit: int = BUNDLE_BYTES) -> None:
        self._room = limit - INDEX_BYTES
        self._entries: dict[str, bytes] = {}
        self.missing: list[dict[str, str]] = []
        self.cut: list[dict[str, str]] = []
        self.is_full = False

    @property
    def count(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def add_object(self, path: str, value: Any) -> None:  # noqa: ANN401 - any JSON
        """Add redacted JSON."""
        text = json.dumps(redact(value), indent=1, sort_keys=True, default=str)
        self._add(path, text + "\n")

    def add_text(self, path: str, text: str, limit: int = TEXT_BYTES) -> None:
        """Add the redacted end of a text. It is cut after the redaction, at the start of a line."""
        content = redact_text(text).encode()
        if len(content) > limit:
            self.note_cut(path, f"only the last {limit} bytes")
            _, _, content = content[-limit:].partition(b"\n")
        self._add(path, content.decode(errors="ignore"))

    def note_missing(self, what: str, reason: str) -> None:
        """Record what could not be read."""
        self.missing.append({"what": what, "reason": redact_text(reason)})

    def note_cut(self, what: str, reason: str) -> None:
        """Record what is there in part only, or not at all because of a bound."""
        self.cut.append({"what": what, "reason": reason})

    def _add(self, path: str, text: str) -> None:
        content = text.encode()
        if len(content) > self._room:
            self.is_full = True
            self.note_cut(path, "left out: the bundle has reached its bound")
            return
        self._room -= len(content)
        self._entries[path] = content

    def index(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return the table of contents: entries with sizes, what is missing, and what was cut."""
        lists: dict[str, list[Any]] = {
            "missing": self.missing,
            "cut": self.cut,
            "files": [
                {"path": path, "bytes": len(content)}
                for path, content in sorted(self._entries.items())
            ],
        }
        found = {**about, **{name: rows[:MAX_NOTES] for name, rows in lists.items()}}
        left_out = {name: len(rows) - MAX_NOTES for name, rows in lists.items()}
        return {**found, "notListed": {name: n for name, n in left_out.items() if n > 0}}

    def write(self, out: Path, about: dict[str, Any], *, force: bool) -> None:
        """Write the file with mode 0600, completely or not at all.

        Raises:
            FileExistsError: The file exists, and `force` is not set.
            OSError: It cannot be written.
        """
        index = json.dumps(self.index(about), indent=1, default=str) + "\n"
        entries = {"index.json": index.encode(), **dict(sorted(self._entries.items()))}
        # mkstemp creates files with mode 0600.
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
        try:
            with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
                for path, content in entries.items():
                    member = tarfile.TarInfo(f"{ROOT}/{path}")
                    member.size, member.mode = len(content), 0o600
                    tar.addfile(member, io.BytesIO(content))
            if not force:
                out.touch(mode=0o600, exist_ok=False)  # a file that appeared meanwhile stays
            Path(name).replace(out)
        finally:
            Path(name).unlink(missing_ok=True)
