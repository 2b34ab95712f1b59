"""The steps of a release, in an order in which a failed one can be run again."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import yaml

from fleetkeeper.adapters.registry.client import RegistryError
from fleetkeeper.adapters.registry.names import Reference
from fleetkeeper.adapters.registry.referrers import attach
from fleetkeeper_local.common import packages
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import cache_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.common.shell import run
from fleetkeeper_local.images import builder
from fleetkeeper_local.release import chart, checks, contents, references, sbom
from fleetkeeper_local.release.sign import Signer

WHEELS_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Release:
    """A version of a checkout, and the registry that gets it."""

    root: Path
    version: str
    registry: str
    """Registry and path: `registry.example.com/fleetkeeper`."""
    upstream: Mapping[str, str] = field(default_factory=dict)
    """Where to find images that are not from this repository, by their name in the values."""
    signer: Signer | None = None

    @property
    def target(self) -> Path:
        """The directory of the files; an earlier one is replaced."""
        return self.root / "dist"

    @property
    def charts(self) -> str:
        """The path below which the registry has charts."""
        return f"{self.registry}/charts"


def publish(release: Release) -> list[str]:
    """Build, push and write everything; return the images by digest.

    The chart is pushed last. A version with a chart is released and never published again.

    Raises:
        LocalError: a check or a step failed; the text says which and what to do.
    """
    changelog = (release.root / "CHANGELOG.md").read_text()
    checks.check_source(release.root, release.version)
    notes = checks.notes(changelog, release.version)
    packages.ensure_packages({"skopeo": "skopeo", "zstd": "zstd"})
    name = f"{release.charts}/{checks.CHART.name}:{release.version}"
    if references.exists(name):
        raise LocalError(f"{name} exists: this version is released; release a higher one")
    shutil.rmtree(release.target, ignore_errors=True)
    release.target.mkdir()
    (release.target / "NOTES.md").write_text(notes)
    if release.signer:
        release.signer.check(release.target)
    _build_wheels(release)
    text = (release.root / checks.CHART / "values.yaml").read_text()
    images = _resolve(release, chart.image_names(yaml.safe_load(text), release.version))
    pinned = chart.pin(text, release.version, images)
    _check_profiles(release, changelog, pinned)
    _sign_images(release, images)
    listed = sorted(set(images.values()))
    (release.target / "images.txt").write_text("".join(f"{image}\n" for image in listed))
    _publish_chart(release, pinned)
    _write_checksums(release)
    return listed


def _build_wheels(release: Release) -> None:
    say("building the wheels")
    expected = release.version.replace("-rc.", "rc")  # as wheels write it (PEP 440)
    run(sys.executable, release.root / "scripts/setup.py", "wheels", timeout_s=WHEELS_TIMEOUT_S)
    wrong = [
        wheel.name for wheel in release.target.glob("*.whl") if wheel.name.split("-")[1] != expected
    ]
    if wrong:
        raise LocalError(
            f"{wrong[0]} is not of version {release.version}; "
            "set contract/fleetkeeper_contract/version.py"
        )


def _resolve(release: Release, names: list[str]) -> dict[str, str]:
    """Return each image by digest; build and push those of this version first."""
    ours = {published: name for name, published in builder.PUBLISHED.items()}
    found = {}
    for name in names:
        repository, _, tag = name.partition(":")
        target = f"{release.registry}/{name}"
        if repository not in ours:
            found[name] = _upstream(release, name)
        elif tag == release.version:
            found[name] = _publish_image(release, ours[repository], target)
        else:
            # An image of an earlier version belongs to an earlier profile. It was published with it.
            found[name] = references.by_digest(target)
    return found


def _publish_image(release: Release, name: str, target: str) -> str:
    """Build and push an image with its SBOM; return it by digest."""
    say(f"publishing {target}")
    image = builder.build(name)
    plain_http = references.plain_http(target)
    image.publish(release.registry, release.version, plain_http=plain_http)
    published = references.by_digest(target)
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".sbom-") as scratch:
        lists = contents.read_lists(image.source, Path(scratch))
    # The time of the commit, so that a repeated release attaches the same file.
    commit_s = run("git", "-C", release.root, "log", "-1", "--format=%ct")
    created = datetime.fromtimestamp(int(commit_s), UTC)
    text = sbom.write(published, release.version, lists, created)
    path = release.target / sbom.file_name(published)
    path.write_text(text)
    try:
        reference = Reference.parse(published)
        asyncio.run(attach(reference, sbom.MEDIA_TYPE, path.name, text.encode()))
    except RegistryError as error:
        raise LocalError(f"cannot attach the SBOM to {published}: {error}") from error
    return published


def _sign_images(release: Release, images: Mapping[str, str]) -> None:
    """Sign the images of this version; those of earlier versions were signed with them."""
    if release.signer is None:
        return
    for name, image in sorted(images.items()):
        if image.startswith(f"{release.registry}/") and name.endswith(f":{release.version}"):
            say(f"signing {image}")
            release.signer.sign(image)


def _upstream(release: Release, name: str) -> str:
    try:
        return references.by_digest(release.upstream.get(name, name))
    except LocalError as error:
        raise LocalError(
            f"{error}; if another registry has {name}, name it: --upstream {name}=OTHER"
        ) from error


def _check_profiles(release: Release, changelog: str, pinned: str) -> None:
    before = checks.previous_version(changelog, release.version)
    if before is not None:
        previous = chart.published_values(release.charts, before)
        chart.check_profiles(previous, yaml.safe_load(pinned))


def _publish_chart(release: Release, pinned: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        archive = chart.package(release.root, pinned, release.target, Path(scratch))
    digest = chart.push(archive, release.charts)
    reference = f"{release.charts}/{checks.CHART.name}:{release.version}@{digest}"
    (release.target / "chart.txt").write_text(f"oci://{reference}\n")
    if release.signer:
        release.signer.sign(f"{references.without_tag(reference)}@{digest}")
    say(f"published {reference}")


def _write_checksums(release: Release) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(release.target.iterdir())
    ]
    sums = release.target / "SHA256SUMS"
    sums.write_text("".join(lines))
    if release.signer:
        release.signer.sign_file(sums)
