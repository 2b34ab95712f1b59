"""Files that are written whole, and only when they change."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, content: str | bytes, mode: int = 0o644) -> bool:
    """Write a file unless it is there with this content and mode.

    Components watch their files: kube-proxy ends when its configuration is written, even with the
    same content. A reader sees the old file or the new one, and never wider rights than `mode`.

    Returns:
        True if the file was written.
    """
    data = content.encode() if isinstance(content, str) else content
    if _has(path, data, mode):
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as handle:
        os.fchmod(handle.fileno(), mode)
        handle.write(data)
    draft.replace(path)
    return True


def _has(path: Path, data: bytes, mode: int) -> bool:
    try:
        return path.read_bytes() == data and path.stat().st_mode & 0o777 == mode
    except OSError:
        return False  # absent, or not readable: writing it says why
