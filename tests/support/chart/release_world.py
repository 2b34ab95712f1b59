"""A checkout that can be released, a real registry on loopback, and small stand-ins for the images."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from fleetkeeper_contract.version import VERSION
from fleetkeeper_local.common import packages
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.control_plane import probes
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.processes import Processes
from fleetkeeper_local.images import builder, oci, registry
from fleetkeeper_local.release.publish import Release, publish
from fleetkeeper_local.release.sign import Signer

NEEDED: Final = {"docker-registry": "docker-registry", "skopeo": "skopeo", "zstd": "zstd"}
READY_S: Final = 400
UPSTREAM: Final = "vllm/vllm-openai:v0.32.0"
AUTHOR: Final = ("-c", "user.name=Test", "-c", "user.email=test@example.com")


def require_programs() -> None:
    """Install the Debian packages as root; skip the test if another user lacks them."""
    if os.geteuid() != 0 and (missing := packages.missing_packages(NEEDED)):
        pytest.skip(f"missing Debian packages: {' '.join(missing)}")
    packages.ensure_packages(NEEDED)


@contextmanager
def running_registry(directory: Path) -> Iterator[int]:
    """Run docker-registry; yield its port."""
    (port,) = free_ports(1)
    registry.write_registry_config(directory / "registry.yaml", directory / "registry", port)
    processes = Processes(directory, tied=True)
    processes.start("registry", ["docker-registry", "serve", str(directory / "registry.yaml")])
    try:
        url = f"http://127.0.0.1:{port}/v2/"
        processes.await_ready("registry", lambda: probes.answers_ok(url), READY_S)
        yield port
    finally:
        processes.stop(["registry"])


def stand_in(name: str, content: str, directory: Path) -> builder.Image:
    """Return an image of one small file with this content."""
    source = directory / f"{name}-{content}"
    (source / "files").mkdir(parents=True)
    (source / "files" / name).write_text(content)
    package = source / "files" / f"{name}_package-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Name: {name}-package\nVersion: 1.0\nLicense: MIT\n\nText")
    layer = oci.write_layer(source / "files", "opt", source / "layer")
    layout = oci.write_image(source / "layout", [layer], oci.ImageConfig(command=["/none"]))
    return builder.Image(name, "1", f"oci:{layout}:1")


@dataclass(frozen=True)
class World:
    """The first release, where it is, and what it returned."""

    checkout: Checkout
    release: Release
    images: list[str]
    scratch: Path

    def content(self, content: str) -> None:
        """Let the builder build images with this content."""
        for name in builder.PUBLISHED:
            image = stand_in(name, content, self.scratch)
            builder.BUILDERS[name] = lambda image=image: image  # type: ignore[misc]


@contextmanager
def released(folders: pytest.TempPathFactory, signer: Signer | None = None) -> Iterator[World]:
    """Publish a release of stand-ins to a real registry."""
    require_programs()
    with (
        pytest.MonkeyPatch.context() as patch,
        running_registry(folders.mktemp("registry")) as port,
    ):
        patch.setattr(builder, "BUILDERS", {})
        scratch = folders.mktemp("images")
        checkout = Checkout(folders.mktemp("checkout"))
        upstream = f"127.0.0.1:{port}/{UPSTREAM}"
        registry.copy(stand_in("vllm", "1", scratch).source, upstream, tls=False)
        place, names = f"127.0.0.1:{port}/fleetkeeper", {UPSTREAM: upstream}
        release = Release(checkout.root, VERSION, place, names, signer)
        found = World(checkout, release, [], scratch)
        found.content("first")
        found.images.extend(publish(release))
        yield found


class Checkout:
    """A copy of this repository, committed, whose changelog has a section of its version."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = _git(REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in listed.rstrip("\0").split("\0"):
            if (REPOSITORY / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, root / name)
        _git(root, "init", "--quiet")
        self.edit("CHANGELOG.md", "## Unreleased", f"## {VERSION} - 2026-01-01")
        self.commit()

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text in a file, which must be there."""
        path = self.root / name
        text = path.read_text()
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new))

    def commit(self) -> None:
        """Commit every change."""
        _git(self.root, "add", "--all")
        _git(self.root, *AUTHOR, "commit", "--quiet", "--message", "Change")

    def become(self, version: str) -> None:
        """Give the next version to distributions, chart, router and gateway; its profiles stay."""
        self.edit("contract/fleetkeeper_contract/version.py", f'"{VERSION}"', f'"{version}"')
        self.edit("charts/fleetkeeper/Chart.yaml", f"ersion: {VERSION}", f"ersion: {version}")
        for image in ("fleetkeeper-router", "fleetkeeper-gateway"):
            self.edit("charts/fleetkeeper/values.yaml", f"{image}:{VERSION}", f"{image}:{version}")
        self.edit("CHANGELOG.md", f"## {VERSION}", f"## {version}\nMore.\n\n## {VERSION}")
        self.commit()


def _git(root: Path, *arguments: str) -> str:
    argv = ["git", "-c", "safe.directory=*", "-c", "commit.gpgsign=false", "-C", str(root)]
    return subprocess.run([*argv, *arguments], capture_output=True, text=True, check=True).stdout
