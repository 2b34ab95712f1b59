"""The files that an image build reads from its context: those that .dockerignore allows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

IGNORE_FILE = ".dockerignore"
_BYTE_CODE = "__pycache__"


def context_digest(root: Path, *words: str) -> str:
    """Return a digest of every file of a build context (path, mode, content) and of other inputs.

    Args:
        root: the directory with .dockerignore, which allows files by lines that begin with `!`.
        words: other inputs of the build: the base image's name, build arguments and the like.

    Raises:
        OSError: .dockerignore or a file cannot be read.
    """
    found = hashlib.sha256(repr(words).encode())
    for path in _files(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        mode = path.stat().st_mode & 0o777
        found.update(f"{path.relative_to(root)}\0{mode:o}\0{content}\0".encode())
    return found.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    lines = (root / IGNORE_FILE).read_text().splitlines()
    for entry in sorted(root / line[1:] for line in lines if line.startswith("!")):
        for path in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            if path.is_file() and _BYTE_CODE not in path.parts:
                yield path
