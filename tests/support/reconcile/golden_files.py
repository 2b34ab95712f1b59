"""The golden files: the children of the golden services, and the pinned hashes of their pods.

The file of a base case holds its children in full. The file of any other case is a merge patch
against its base: a value replaces or adds, and null removes. Three notations keep a patch short:

- `env[name]` is a list of mappings by a key that is unique in it, and `(after)` the item before.
  A list in the order of its keys needs no `(after)`.
- `value(json)` is a text with JSON, as a mapping.
- The hash of a pod template is only in template-hashes.yaml, not in these files.

Run as a program, the module writes the files again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH, LABEL_COMPONENT
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.router import desired_router_deployment
from tests.support.reconcile.golden_services import CASES, GoldenCase

FOLDER = Path(__file__).parents[2] / "golden" / "manifests"
HASHES = FOLDER.parent / "template-hashes.yaml"
REGENERATE = ".venv/bin/python -m tests.support.reconcile.golden_files"

IN_FULL = ("minimal-cuda", "long-name")
"""The cases without a base. A patch for the long name would change each name: more than the whole."""

AFTER = "(after)"


def base_of(name: str) -> str | None:
    """Return the case against which the file of a case is a patch."""
    if name in IN_FULL:
        return None
    on_cpu = CASES[name].spec.get("engine", {}).get("profile") == "cpu"
    return "minimal-cpu" if on_cpu and name != "minimal-cpu" else "minimal-cuda"


@cache
def stored_children(name: str) -> dict[str, Any]:
    """Return the children of a case according to its golden file and those of its bases."""
    base = base_of(name)
    patch = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    children: dict[str, Any] = _merged(stored_children(base) if base else {}, patch)
    return children


@cache
def children_of(name: str) -> dict[str, Any]:
    """Return the children of a case as its builders make them, by kind and name."""
    return _by_key(
        (f"{child['kind']}/{child['metadata']['name']}", readable(child))
        for child in CASES[name].children()
    )


def golden_text(name: str) -> str:
    """Return the text of a golden file."""
    base = base_of(name)
    if base is None:
        return text_of(children_of(name))
    return f"# merge patch against {base}: null removes\n" + text_of(
        _patch(children_of(base), children_of(name))
    )


def text_of(value: Any) -> str:
    """Return a value as YAML."""
    return yaml.safe_dump(value, width=100, default_flow_style=None)


def same(one: Any, other: Any) -> bool:
    """Whether two values are written alike. True and 1, which are equal in Python, are not."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def readable(value: Any) -> Any:
    """Return a value of a manifest in the notations of the golden files."""
    if isinstance(value, dict):
        return dict(_entry(key, item) for key, item in value.items())
    if isinstance(value, list):
        return [readable(item) for item in value]
    if value is None:
        raise TypeError("a golden file cannot hold null: there it removes a value")
    return value


def _entry(key: str, value: Any) -> tuple[str, Any]:
    if key == ANNOTATION_TEMPLATE_HASH:
        return key, f"in {HASHES.name}"
    if isinstance(value, str) and _is_json_object(value):
        return f"{key}(json)", readable(json.loads(value))
    if isinstance(value, list) and (unique := _unique_key(value)):
        items = ((item.pop(unique), item) for item in readable(value))
        return f"{key}[{unique}]", _by_key(items)
    return key, readable(value)


def _is_json_object(text: str) -> bool:
    """Whether a text can be written as a mapping and read back without a loss."""
    if not text.startswith("{") or "null" in text:
        return False
    try:
        return text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    except ValueError:
        return False


def _unique_key(items: list[Any]) -> str | None:
    """Return the key by which a list of mappings can be written as a mapping."""
    for key in ("mountPath", "name"):
        values = [item.get(key) for item in items if isinstance(item, dict)]
        texts = {value for value in values if isinstance(value, str)}
        if items and len(texts) == len(items):
            return key
    return None


def _by_key(items: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return items by their keys. Each names the item before it, unless the keys are sorted."""
    found = dict(items)
    keys = list(found)
    if keys != sorted(keys):
        for before, key in pairwise(keys):
            found[key] = {**found[key], AFTER: before}
    return found


def _patch(base: Any, value: Any) -> Any:
    """Return the merge patch (RFC 7386) that makes a value of its base."""
    if not (isinstance(base, dict) and isinstance(value, dict)):
        return value
    changed = {
        key: _patch(base.get(key), item)
        for key, item in value.items()
        if key not in base or not same(base[key], item)
    }
    return changed | dict.fromkeys(base.keys() - value.keys())


def _merged(base: Any, patch: Any) -> Any:
    """Return a value with a merge patch applied."""
    if not (isinstance(base, dict) and isinstance(patch, dict)):
        return patch
    both = {**base, **{key: _merged(base.get(key), item) for key, item in patch.items()}}
    return {key: item for key, item in both.items() if item is not None}


def template_hashes(case: GoldenCase) -> dict[str, str]:
    """Return the hashes of the pod templates by component, and of the router of earlier releases."""
    found = {
        child["metadata"]["labels"][LABEL_COMPONENT]: _hash_of(child)
        for child in case.children()
        if child["kind"] == "Deployment"
    }
    if "router" in found:
        earlier = desired_router_deployment(case.service(), case.context, case.vllm_router)
        found["vllm-router"] = _hash_of(earlier)
    return found


def _hash_of(deployment: Manifest) -> str:
    text: str = deployment["spec"]["template"]["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH]
    return text


def pinned_hashes() -> dict[str, dict[str, str]]:
    """Return the hashes that must not change, by case and component."""
    pinned: dict[str, dict[str, str]] = yaml.safe_load(HASHES.read_text())
    return pinned


def regenerate(*, accept_restarts: bool) -> list[str]:
    """Write the golden files; change pinned hashes of known cases only with `accept_restarts`.

    Returns the cases whose template hash differs from the pinned one.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for stale in {path.stem for path in FOLDER.glob("*.yaml")} - CASES.keys():
        (FOLDER / f"{stale}.yaml").unlink()
    for name in CASES:
        (FOLDER / f"{name}.yaml").write_text(golden_text(name))
    pinned = pinned_hashes()
    now = {name: template_hashes(case) for name, case in CASES.items()}
    changed = sorted(name for name in now.keys() & pinned.keys() if now[name] != pinned[name])
    kept = {} if accept_restarts else pinned
    HASHES.write_text(
        yaml.safe_dump({name: {**now[name], **kept.get(name, {})} for name in sorted(now)})
    )
    return changed


if __name__ == "__main__":
    accepted = "--accept-restarts" in sys.argv[1:]
    restarts = regenerate(accept_restarts=accepted)
    print(f"{len(CASES)} golden files written to {FOLDER}")
    if restarts:
        print(f"template hash changed: {', '.join(restarts)}")
        print(
            "engines and routers restart on an upgrade of the operator" + ("; accepted" * accepted)
        )
        sys.exit(0 if accepted else 1)
