"""Checks before a release publishes anything, and the notes from the changelog."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import run

CHART = Path("charts/fleetkeeper")
_NUMBER = r"(?:0|[1-9]\d*)"
_VERSION = rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-rc\.{_NUMBER})?"
"""The part of SemVer that is a version of a Python package, a chart, and a tag of an image."""
_HEADING = re.compile(rf"^## \[?({_VERSION})\]?(?: .*)?$", re.MULTILINE)


def check_source(root: Path, version: str) -> None:
    """Raise LocalError unless the checkout can be released as this version.

    Raises:
        LocalError: the version is not SemVer, is not the chart's, or the checkout has changes that
            are not committed.
    """
    if not re.fullmatch(_VERSION, version):
        raise LocalError(f"{version!r} is not a version; write X.Y.Z or X.Y.Z-rc.1, without a v")
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text())
    if {chart["version"], chart["appVersion"]} != {version}:
        raise LocalError(
            f"{CHART}/Chart.yaml has version {chart['version']} and appVersion {chart['appVersion']}, "
            f"not {version}; set them and contract/fleetkeeper_contract/version.py, then commit"
        )
    changed = run("git", "-C", root, "status", "--porcelain").splitlines()
    if changed:
        raise LocalError(
            f"the checkout has {len(changed)} changes that are not committed (first: {changed[0].strip()}); "
            "commit or remove them"
        )


def notes(changelog: str, version: str) -> str:
    """Return the changelog's section of a version, without its heading.

    Raises:
        LocalError: there is no such section, or it is empty.
    """
    for heading in _HEADING.finditer(changelog):
        if heading[1] == version:
            text = re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
            if text.strip():
                return text.strip() + "\n"
    raise LocalError(
        f"CHANGELOG.md has no text under a heading `## {version}`; rename `## Unreleased`"
    )


def previous_version(changelog: str, version: str) -> str | None:
    """Return the version whose section follows that of this version; None for the first one."""
    versions = _HEADING.findall(changelog)
    later = versions[versions.index(version) + 1 :]
    return later[0] if later else None
