"""Stand-ins for docker, podman, kind, k3d, minikube, kubectl and helm, which this machine lacks.

They accept only arguments that the sources of the real programs define (k3d 5.9, kind and minikube
of August 2026), keep clusters and images in a JSON file, and record every call.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

State = dict[str, Any]
RECORDED = ("KUBECONFIG", "KIND_EXPERIMENTAL_PROVIDER", "DOCKER_BUILDKIT")
NAME = r"(?P<name>[a-z0-9-]+)"
FILE = r"(?P<file>/\S+)"
IMAGE = r"(?P<image>localhost/\S+:\S+)"
KUBECTL = r"(?:--cache-dir \S+ )?--kubeconfig (?P<file>/\S+) "
K3S = r"(?: --k3s-arg --kubelet-arg=[a-z-]+=[^@ ]+@server:\*){2}"
OTHERS: State = {
    "clusters": {},
    "built": {},
    "sources": {},
    "broken": [],
    "server": "",
    "values": None,
}


def install(directory: Path, state: Path, *names: str) -> None:
    """Write stand-ins with these names into a directory for the PATH."""
    directory.mkdir(exist_ok=True)
    for name in names:
        path = directory / name
        path.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -I -S "{Path(__file__)}" "{state}" {name} "$@"\n'
        )
        path.chmod(0o755)


def read(path: Path) -> State:
    """Return the state of the stand-ins."""
    return {**OTHERS, "calls": [], **(json.loads(path.read_text()) if path.exists() else {})}


def write(path: Path, **changes: object) -> None:
    """Change the state of the stand-ins."""
    path.write_text(json.dumps({**read(path), **changes}))


# -- what each of them does, by the arguments -------------------------------------------------


def create(state: State, name: str, file: str = "") -> str:
    """Create a cluster as the user's command would."""
    assert name not in state["clusters"], f"cluster {name} exists"
    state["clusters"][name] = {"marked": False, "images": []}
    return export(state, name, file or os.environ["KUBECONFIG"])


def export(state: State, name: str, file: str = "") -> str:
    """Write the cluster's kubeconfig."""
    assert name in state["clusters"], f"no cluster {name}"
    item = {"cluster": {"server": state["server"]}, "name": "c"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [item],
        "contexts": [{"context": {"cluster": "c", "user": "u"}, "name": name}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": name,
    }
    Path(file or os.environ["KUBECONFIG"]).write_text(json.dumps(config))
    return ""


def delete(state: State, name: str, file: str = "") -> str:
    """Delete a cluster."""
    del file
    state["clusters"].pop(name, None)
    return ""


def load(state: State, name: str, file: str) -> str:
    """Load an archive."""
    state["clusters"][name]["images"].append(Path(file).read_text())
    return ""


def build(state: State, containerfile: str, image: str) -> str:
    """Build an image whose content is that of its source."""
    assert Path(containerfile).is_file(), containerfile
    source = state["sources"].get(containerfile, containerfile)
    state["built"][image] = hashlib.sha256(source.encode()).hexdigest()
    return "STEP 1"


def tag(state: State, image: str, new: str) -> str:
    """Give an image another name."""
    state["built"][new] = state["built"][image]
    return ""


def save(state: State, file: str, image: str) -> str:
    """Save an image."""
    assert image in state["built"], image
    assert not Path(file).exists(), f"{file} exists; podman does not change archives"
    Path(file).write_text(image)
    return ""


def names(state: State) -> str:
    """Return the clusters as kind and k3d print them."""
    return "\n".join(f"{name}   1/1   0/0   true" for name in state["clusters"])


def nodes(state: State, file: str) -> str:
    """Return the nodes and their images."""
    images = of(state, file)["images"]
    listed = [{"names": [f"{image}@sha256:0", image]} for image in images]
    return json.dumps({"items": [{"status": {"images": listed}}, {"status": {"images": listed}}]})


def of(state: State, file: str) -> State:
    """Return the cluster of a kubeconfig."""
    found: State = state["clusters"][json.loads(Path(file).read_text())["current-context"]]
    return found


def mark(state: State, file: str) -> str:
    """Apply the mark from standard input."""
    (item,) = json.loads(sys.stdin.read())["items"]
    assert (item["kind"], item["metadata"]["namespace"]) == ("ConfigMap", "kube-system")
    of(state, file)["marked"] = True
    return ""


def upgrade(state: State, file: str, name: str) -> str:
    """Install the chart."""
    of(state, file)
    state["values"] = json.loads(sys.stdin.read())
    return name


def nothing(_state: State, **_known: str) -> str:
    """Succeed."""
    return ""


def absent(_state: State, **_known: str) -> str:
    """Fail, as Helm does for a release that does not exist."""
    raise SystemExit(1)


def engine(prefix: str) -> dict[str, Callable[..., str]]:
    """Return what docker and podman do; podman prints no `sha256:`."""
    return {
        r"info": nothing,
        rf"build --file (?P<containerfile>\S+) --tag {IMAGE} \.": build,
        rf"image inspect --format {{{{\.Id}}}} {IMAGE}": lambda state, image: (
            prefix + state["built"][image]
        ),
        rf"tag {IMAGE} (?P<new>localhost/\S+:[0-9a-f]{{12}})": tag,
        rf"save --output {FILE} {IMAGE}": save,
    }


PROGRAMS: dict[str, dict[str, Callable[..., str]]] = {
    "docker": engine("sha256:"),
    "podman": engine(""),
    "kind": {
        r"get clusters": lambda state: "\n".join(state["clusters"]),
        rf"create cluster --name {NAME} --kubeconfig {FILE} --wait 5m": create,
        rf"export kubeconfig --name {NAME} --kubeconfig {FILE}": export,
        rf"load image-archive {FILE} --name {NAME}": load,
        rf"delete cluster --name {NAME} --kubeconfig {FILE}": delete,
    },
    "k3d": {
        r"cluster list --no-headers": names,
        rf"cluster create {NAME} --kubeconfig-update-default=false --timeout 10m{K3S}": create,
        rf"kubeconfig write {NAME} --output {FILE}": export,
        rf"image import {FILE} --cluster {NAME} --mode direct": load,
        rf"cluster delete {NAME}": delete,
    },
    "minikube": {
        r"profile list --light --output json": lambda state: json.dumps(
            {"invalid": [], "valid": [{"Name": name} for name in state["clusters"]]}
        ),
        rf"start --profile {NAME} --cpus max --memory 10g --disk-size 40g": create,
        rf"update-context --profile {NAME}": export,
        rf"image load {FILE} --profile {NAME}": load,
        rf"image ls --profile {NAME}": lambda state, name: "\n".join(
            state["clusters"][name]["images"]
        ),
        rf"delete --profile {NAME}": delete,
    },
    "kubectl": {
        rf"{KUBECTL}apply --server-side --field-manager=fleetkeeper-demo -f -": mark,
        rf"{KUBECTL}-n kube-system get configmap fleetkeeper-demo --ignore-not-found -o name": (
            lambda state, file: "configmap/fleetkeeper-demo" if of(state, file)["marked"] else ""
        ),
        rf"{KUBECTL}get nodes -o json": nodes,
        rf"{KUBECTL}delete namespace {NAME} --ignore-not-found": nothing,
    },
    "helm": {
        rf"{KUBECTL}status {NAME} --namespace \S+ -o=json": absent,
        rf"{KUBECTL}upgrade --install {NAME} /\S+ --create-namespace --namespace \S+ --wait "
        r"--timeout 10m --values -": upgrade,
        rf"{KUBECTL}uninstall {NAME} --namespace \S+ --wait --ignore-not-found": (nothing),
    },
}


def main(path: Path, program: str, *arguments: str) -> None:
    """Record the call and do what the program does; end with 64 if it has no such arguments."""
    said = " ".join(arguments)
    state = read(path)
    environment = {name: os.environ[name] for name in RECORDED if name in os.environ}
    state["calls"].append([f"{program} {said}", environment])
    path.write_text(json.dumps(state))
    broken = next((text for text in state["broken"] if f"{program} {said}".startswith(text)), None)
    for pattern, action in PROGRAMS[program].items():
        found = re.fullmatch(pattern, said)
        if found and broken:
            sys.stderr.write(f"{program} is broken here\n")
            sys.exit(1)
        if found:
            sys.stdout.write(action(state, **found.groupdict()) + "\n")
            path.write_text(json.dumps(state))
            return
    sys.stderr.write(f"{program}: unexpected arguments: {said}\n")
    sys.exit(64)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
