"""A reader of InferenceServices in YAML files that keeps the line number of each field."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fleetkeeper.api.names import API_VERSION, GROUP, KIND
from fleetkeeper.api.parse import InferenceService, InvalidService, parse_service
from fleetkeeper.api.schema.error_messages import FieldError, path_text

STANDARD_INPUT = "-"
KSERVE_GROUP = "serving.kserve.io"


class UnreadableFile(ValueError):
    """A file that cannot be read or is not valid YAML. The message names the place and the cause."""


class _Loader(yaml.SafeLoader):
    """A loader that reads dates as strings, as Kubernetes does."""


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in resolvers if entry[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True, slots=True)
class Document:
    """An object of a file. `lines` maps each path (`spec.model.source`) to the line of its key."""

    file: str
    manifest: Mapping[str, Any]
    lines: Mapping[str, int]
    repeated: tuple[FieldError, ...]

    @property
    def is_service(self) -> bool:
        """Return True if the object is an InferenceService of any version."""
        api_version = str(self.manifest.get("apiVersion") or "")
        return self.manifest.get("kind") == KIND and api_version.startswith(f"{GROUP}/")

    @property
    def is_namesake(self) -> bool:
        """Return True if another system has this kind of object, or the kind has another group."""
        group = str(self.manifest.get("apiVersion") or "").rpartition("/")[0]
        return not self.is_service and (self.manifest.get("kind") == KIND or group == KSERVE_GROUP)

    @property
    def described(self) -> str:
        """Return the place, kind and name of an object that is skipped, and why."""
        kind, metadata = self.manifest.get("kind"), self.manifest.get("metadata")
        name = metadata.get("name", "") if isinstance(metadata, Mapping) else ""
        text = f"{self.place('')}: {kind} {name}".rstrip()
        group = str(self.manifest.get("apiVersion") or "").rpartition("/")[0]
        if group == KSERVE_GROUP:
            return f"{text} is an object of KServe ({group}), whose fields differ; write one of {API_VERSION} (see examples)"
        if kind == KIND:
            return f"{text} is of {group or 'no group'}, not of {GROUP}; set apiVersion to {API_VERSION}"
        return f"{text} is not an InferenceService"

    def place(self, path: str) -> str:
        """Return `FILE:LINE` of a field, or of the nearest existing parent of its path."""
        while path and path not in self.lines:
            cut = max(path.rfind("."), path.rfind("["))
            path = path[:cut] if cut > 0 else ""
        return f"{self.file}:{self.lines.get(path, self.lines[''])}"

    def service(self, *, allow_floating_revisions: bool) -> InferenceService:
        """Return the service that the object describes.

        Raises:
            InvalidService: The object is invalid; contains all errors, including duplicate keys.
        """
        errors: tuple[FieldError, ...] = self.repeated
        try:
            service = parse_service(
                self.manifest, allow_floating_revisions=allow_floating_revisions
            )
        except InvalidService as problem:
            every = (*errors, *problem.errors)
            raise InvalidService(every, problem.spec, problem.part) from problem
        if errors:
            raise InvalidService(errors, service.spec)
        return service


def read_documents(file: str) -> list[Document]:
    """Return all objects of a file, or of standard input for `-`. Kubernetes lists are expanded.

    Raises:
        UnreadableFile: The file cannot be read or is not valid YAML.
    """
    shown = "standard input" if file == STANDARD_INPUT else file
    try:
        text = sys.stdin.read() if file == STANDARD_INPUT else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UnreadableFile(f"{shown}: cannot read the file: {_why(problem)}") from problem
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=_Loader) if node is not None]
        return [document for node in nodes for document in _documents(shown, node)]
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise UnreadableFile(f"{shown}:{line}: invalid YAML: {problem.problem}") from problem
    except yaml.YAMLError as problem:
        raise UnreadableFile(f"{shown}: invalid YAML: {problem}") from problem


def _why(problem: Exception) -> str:
    return str(problem.strerror) if isinstance(problem, OSError) else "not UTF-8 text"


def _documents(file: str, node: yaml.Node) -> Iterator[Document]:
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise UnreadableFile(
            f"{file}:{line}: must be an object with apiVersion, kind, metadata, and spec"
        )
    manifest = _Loader("").construct_document(node)
    items = _items(node) if str(manifest.get("kind", "")).endswith("List") else None
    if items is not None:
        for item in items:
            yield from _documents(file, item)
        return
    lines: dict[str, int] = {"": node.start_mark.line + 1}
    repeated: list[FieldError] = []
    _note_lines(node, (), lines, repeated)
    yield Document(file, manifest, lines, tuple(repeated))


def _items(node: yaml.MappingNode) -> list[yaml.Node] | None:
    for key, value in node.value:
        if key.value == "items" and isinstance(value, yaml.SequenceNode):
            return list(value.value)
    return None


def _note_lines(
    node: yaml.Node,
    path: tuple[str | int, ...],
    lines: dict[str, int],
    repeated: list[FieldError],
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            text, line = path_text(*inner), key.start_mark.line + 1
            first = lines.get(text)
            lines[text] = line
            if first is not None:
                repeated.append(
                    FieldError(text, f"is set twice, first on line {first}; remove one of them")
                )
                continue
            _note_lines(value, inner, lines, repeated)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = (*path, index)
            lines[path_text(*inner)] = value.start_mark.line + 1
            _note_lines(value, inner, lines, repeated)
