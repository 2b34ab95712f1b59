"""The release before this one, from the history of the repository, for tests of an upgrade."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.images import builder

BEFORE_THE_FIRST = "95ee68cdb7be6b8366a1025b5764a0e21b191c25"
"""Stands for the earlier release while there is no tag; it has the API of the first release."""


@dataclass(frozen=True)
class EarlierRelease:
    """A checkout of the release before this one: its chart, and the images built from it."""

    revision: str
    root: Path

    @property
    def chart(self) -> Path:
        """The chart."""
        return self.root / "charts" / "fleetkeeper"

    def operator_image(self) -> builder.Image:
        """Build its operator."""
        recipe = builder.Recipe("earlier-operator", "operator/Containerfile", root=self.root)
        return builder.build_image(recipe)

    def router_image(self) -> builder.Image:
        """Build its router."""
        recipe = builder.Recipe(
            "earlier-router", "engine_image/Containerfile.router", root=self.root
        )
        return builder.build_image(recipe)

    def engine_image(self) -> builder.Image:
        """Build its engine with today's dependencies: a second set of them is 6 GB."""
        return builder.engine_image("earlier-engine", self.root)


def earlier_release(directory: Path) -> EarlierRelease:
    """Extract the release before this one: the newest tag before this commit.

    A checkout without history skips the test.
    """
    described = _git("describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "HEAD^")
    revision = described.stdout.decode().strip() or BEFORE_THE_FIRST
    if _git("cat-file", "-e", revision).returncode:
        pytest.skip(f"the history has no {revision}; run `git fetch --unshallow --tags`")
    archive = _git("archive", revision)
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return EarlierRelease(revision, directory)


def _git(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *args], cwd=REPOSITORY, capture_output=True, check=False)
