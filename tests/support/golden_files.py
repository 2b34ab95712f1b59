"""The golden files: the children of the golden services, and the pinned hashes of their pods.

Run as a program, it writes them again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from fleetkeeper.api.names import ANNOTATION_TEMPLATE_HASH, LABEL_COMPONENT
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.router import desired_router_deployment
from tests.support.golden_services import CASES, GoldenCase

FOLDER = Path(__file__).parents[1] / "golden" / "manifests"
HASHES = FOLDER.parent / "template-hashes.yaml"


BASE = "minimal-cuda"


def golden_text(name: str) -> str:
    """Return the text of a golden file. Children equal to the base case's are only named."""
    children = CASES[name].children()
    base = () if name == BASE else CASES[BASE].children()
    same = [f"{child['kind']}/{child['metadata']['name']}" for child in children if child in base]
    head = "".join(f"# as in {BASE}: {child}\n" for child in same)
    own = [child for child in children if child not in base]
    return head + yaml.safe_dump_all(own, sort_keys=True, width=100, default_flow_style=None)


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
