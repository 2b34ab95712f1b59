"""The table of accepted and refused services (service_cases.yaml), read for both sides."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from fleetkeeper.api.names import API_VERSION, KIND

TABLE = Path(__file__).with_name("service_cases.yaml")
NULL = "<null>"
"""A null that is written into the spec (a plain null removes the key)."""


@dataclass(frozen=True)
class Case:
    """One service and the expected result."""

    case: str
    name: str
    spec: dict[str, Any]
    reject: str | None
    says: str
    by: Literal["both", "operator", "profile"]

    @property
    def refused_by_operator(self) -> bool:
        """Return True if `parse_service` must refuse it."""
        return self.reject is not None and self.by in {"both", "operator"}

    @property
    def refused_by_server(self) -> bool:
        """Return True if the API server must refuse it."""
        return self.reject is not None and self.by == "both"

    def manifest(self, namespace: str = "team-a") -> dict[str, Any]:
        """Return the InferenceService."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": self.name, "namespace": namespace},
            "spec": copy.deepcopy(self.spec),
        }


class _Loader(yaml.SafeLoader):
    """A YAML loader with !null, !long [begin, length], !repeat [n, item with #], !map [n, key, value]."""


def _long(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> str:
    begin, length = loader.construct_sequence(node)
    text = str(begin)
    return text + text[-1] * (int(length) - len(text))


def _repeat(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[dict[str, Any]]:
    count, item = loader.construct_sequence(node, deep=True)
    return [
        {
            key: value.replace("#", str(index)) if isinstance(value, str) else value
            for key, value in item.items()
        }
        for index in range(count)
    ]


def _map(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[str, str]:
    count, key, value = loader.construct_sequence(node, deep=True)
    return {f"{key}{index}": value for index in range(count)}


_Loader.add_constructor("!null", lambda *_: NULL)
_Loader.add_constructor("!long", _long)
_Loader.add_constructor("!repeat", _repeat)
_Loader.add_constructor("!map", _map)


def _merged(base: Any, change: Any) -> Any:
    if isinstance(change, dict):
        merged = {**base} if isinstance(base, dict) else {}
        for key, value in change.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = _merged(merged.get(key), value)
        return merged
    if isinstance(change, list):
        return [_merged(None, item) for item in change]
    return None if change == NULL else change


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """Return every case of the table, in order."""
    rows = yaml.load(TABLE.read_text(), Loader=_Loader)
    base = {"model": {"source": "pvc://models/llama"}}
    return tuple(
        Case(
            case=row["case"],
            name=row.get("name", "chat"),
            spec=_merged(base, row.get("spec", {})),
            reject=row.get("reject"),
            says=row.get("says", ""),
            by=row.get("by", "both"),
        )
        for row in rows
    )
