"""The sound part of a spec with mistakes, so that one round reports the mistakes of all kinds.

Rules between fields, and what an engine profile refuses, need a valid spec. Without its broken
fields, the spec is valid. An error that depends on one of these fields is not reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fleetkeeper.api.schema.error_messages import FieldError, path_text

Path = tuple[str | int, ...]

_SOURCES = (
    "pvc://unknown",
    "hf://unknown/unknown",
    "s3://unknown",
    f"oci://unknown.invalid/unknown@sha256:{64 * '0'}",
)
"""Stand-ins for a source of the same scheme: other rules depend on the scheme alone."""
_STAND_INS: Mapping[Path, Any] = {
    ("model",): {"source": _SOURCES[0]},
    ("model", "source"): _SOURCES[0],
}
"""Stand-ins for the required fields. Errors that depend on them are not reported."""
_STEP = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")


class SoundPart:
    """A copy of a raw spec from which broken fields are dropped.

    Paths of dropped fields and of errors count the items of lists as the manifest does.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.tree: Any = json.loads(json.dumps(raw, default=str))
        self._kept: dict[Path, list[int]] = {}
        self._lost: set[str] = set()
        self._changes = 0

    def drop(self, places: Iterable[Path]) -> bool:
        """Drop what is at these places of the tree, or its parent if it is missing there.

        Return False if nothing is left to drop.
        """
        before = self._changes
        for place in [self._original(place) for place in places]:
            self._drop(place)
        return self._changes > before

    def remaining(self, errors: Iterable[FieldError]) -> list[FieldError]:
        """Return the errors that do not depend on a dropped field, with the paths of the manifest."""
        found = []
        for error in errors:
            path = self._in_manifest(error.path)
            reads = [self._in_manifest(text) for text in error.reads] or [path]
            if not any(_overlap(text, lost) for text in reads for lost in self._lost):
                found.append(FieldError(path, error.message))
        return found

    def _drop(self, path: Path) -> None:
        if not path:
            return
        node = self._at(path[:-1])
        key = path[-1]
        if isinstance(node, dict) and self._has_known_scheme(path, node):
            return
        if path in _STAND_INS and isinstance(node, dict):
            node[key] = _STAND_INS[path]
        elif isinstance(node, list) and isinstance(key, int):
            kept = self._indices(path[:-1], node)
            if key not in kept:
                return
            del node[kept.index(key)]
            kept.remove(key)
        elif isinstance(node, dict) and key in node:
            del node[key]
        else:
            self._drop(path[:-1])
            return
        self._changes += 1
        self._lost.add(path_text("spec", *path))

    def _has_known_scheme(self, path: Path, node: dict[str, Any]) -> bool:
        """Replace a source whose scheme is known, and return True. Its rules stay."""
        if path[0] != "model" or path[-1] != "source":
            return False
        written = str(node.get("source"))
        for source in _SOURCES:
            if written != source and written.startswith(source[: source.index("://") + 3]):
                node["source"] = source
                self._changes += 1
                return True
        return False

    def _indices(self, path: Path, items: list[Any]) -> list[int]:
        """Return the indices in the manifest of a list's remaining items."""
        return self._kept.setdefault(path, list(range(len(items))))

    def _at(self, path: Path) -> Any:  # noqa: ANN401 - any JSON value
        """Return the value at a path of the manifest, None if it was dropped."""
        node = self.tree
        for depth, key in enumerate(path):
            if isinstance(node, list) and isinstance(key, int):
                kept = self._indices(path[:depth], node)
                node = node[kept.index(key)] if key in kept else None
            else:
                node = node.get(key) if isinstance(node, dict) else None
        return node

    def _original(self, place: Path) -> Path:
        """Return the path in the manifest of a place of the tree."""
        path: Path = ()
        for key in place:
            kept = self._kept.get(path)
            path = (*path, kept[key] if kept is not None and isinstance(key, int) else key)
        return path

    def _in_manifest(self, text: str) -> str:
        if "[" not in text:
            return text
        steps = _STEP.findall(text.removeprefix("spec"))
        place = [int(index) if index else name for index, name in steps]
        return path_text("spec", *self._original(tuple(place)))


def _overlap(one: str, other: str) -> bool:
    """Return True if one path is the other one or inside it."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and long[len(short) :][:1] in {"", ".", "["}
