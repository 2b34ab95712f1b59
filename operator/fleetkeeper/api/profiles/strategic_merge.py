"""Kubernetes' strategic merge of a patch into a pod template, without its directives.

Maps are merged. Lists are merged by the key that the API gives them (`patchMergeKey` of PodSpec and
Container), and every other list is replaced. Items that the original lacks are appended. Kubernetes
puts them first, but the engine must stay the container that `kubectl logs` and `exec` choose.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

MERGE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "containers": "name",
        "env": "name",
        "hostAliases": "ip",
        "imagePullSecrets": "name",
        "initContainers": "name",
        "ports": "containerPort",
        "schedulingGates": "name",
        "topologySpreadConstraints": "topologyKey",
        "volumeDevices": "devicePath",
        "volumeMounts": "mountPath",
        "volumes": "name",
    }
)
"""The lists of PodSpec and Container that are merged, with the field that identifies an item."""


def strategic_merge(original: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `original` with the patch merged into it.

    Worked example: the patch `{"containers": [{"name": "a", "tty": True}]}` changes container `a` if
    there is one, and otherwise appends it.
    """
    merged = copy.deepcopy(dict(original))
    for key, value in patch.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = strategic_merge(old, value)
        elif key in MERGE_KEYS and isinstance(old, list) and isinstance(value, Sequence):
            merged[key] = _merged_list(old, value, MERGE_KEYS[key])
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _merged_list(original: list[Any], patch: Sequence[Any], key: str) -> list[Any]:
    merged = list(original)
    places = {item.get(key): place for place, item in enumerate(merged)}
    for item in patch:
        place = places.get(item.get(key))
        if place is None:
            merged.append(copy.deepcopy(dict(item)))
        else:
            merged[place] = strategic_merge(merged[place], item)
    return merged
