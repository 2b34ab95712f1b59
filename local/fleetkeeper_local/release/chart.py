"""The chart of a release: its values with every image by digest, and its archive in a registry."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import attempt
from fleetkeeper_local.control_plane.programs import program_path
from fleetkeeper_local.release import references
from fleetkeeper_local.release.checks import CHART

Values = dict[str, Any]
FIELDS = ("image", "injectedImage")
"""The fields of an engine profile that name images."""
TIMEOUT_S = 300.0


def image_names(values: Values, version: str) -> list[str]:
    """Return the names of all images in the values of this version's chart, sorted."""
    operator = values["image"]
    names = {f"{operator['repository']}:{operator['tag'] or version}"}
    names.update(section["image"] for section in _sections(values))
    for profile in values["engineProfiles"].values():
        names.update(profile[field] for field in FIELDS if field in profile)
    return sorted(names)


def _sections(values: Values) -> list[Values]:
    """Return the sections with the image of another component; older charts have no gateway."""
    return [values[name] for name in ("router", "gateway") if name in values]


def pin(text: str, version: str, digests: Mapping[str, str]) -> str:
    """Return the text of values.yaml with every image by digest; comments stay.

    Args:
        text: values.yaml with the names of `image_names`.
        version: the chart's.
        digests: `NAME@sha256:...` for each of them.

    Raises:
        LocalError: the text has an image where this function does not expect one.
    """
    values = yaml.safe_load(text)
    operator = values["image"]
    name, _, digest = digests[f"{operator['repository']}:{operator['tag'] or version}"].partition(
        "@"
    )
    text = re.sub(r"(?m)^(  repository: )\S+", rf"\g<1>{name}", text, count=1)
    text = re.sub(r'(?m)^(  digest: )""', rf'\g<1>"{digest}"', text, count=1)
    text = re.sub(
        rf"(?m)^( +(?:{'|'.join(FIELDS)}): )(\S+)",
        lambda found: found[1] + digests.get(found[2], found[2]),
        text,
    )
    if yaml.safe_load(text) != _expected(values, name, digest, digests):
        raise LocalError(
            "charts/fleetkeeper/values.yaml names images in a way that a release cannot replace; "
            "write each image of router, gateway and engineProfiles on a line of its own"
        )
    return text


def _expected(values: Values, name: str, digest: str, digests: Mapping[str, str]) -> Values:
    wanted = copy.deepcopy(values)
    wanted["image"].update(repository=name, digest=digest)
    for section in (*_sections(wanted), *wanted["engineProfiles"].values()):
        section.update(
            {field: digests[section[field]] for field in FIELDS if section.get(field) in digests}
        )
    return wanted


def check_profiles(before: Values, now: Values) -> None:
    """Raise LocalError if an engine profile of the previous release is different now.

    A service keeps its profile over an upgrade, so a changed profile would restart its engines
    (docs/adr/0006-engine-profiles.md, docs/adr/0032-a-release-names-content.md).
    """
    for name, profile in before["engineProfiles"].items():
        if name not in now["engineProfiles"]:
            continue
        present = now["engineProfiles"][name]
        for field in sorted({*profile, *present}):
            if profile.get(field) != present.get(field):
                raise LocalError(
                    f"engineProfiles.{name}.{field} was {profile.get(field)!r} in the previous release "
                    f"and would be {present.get(field)!r}; a profile never changes: restore it, add a "
                    "profile with a higher number, and point the alias to that one. If only the tag of an "
                    "upstream image moved, name the earlier digest with --upstream"
                )


def package(root: Path, values: str, target: Path, scratch: Path) -> Path:
    """Package the checkout's chart with these values; return the archive in `target`."""
    draft = scratch / CHART.name
    shutil.copytree(root / CHART, draft)
    (draft / "values.yaml").write_text(values)
    shutil.copy(root / "LICENSE", draft)
    _helm("lint", "--quiet", "--strict", str(draft))
    _helm("package", str(draft), f"--destination={target}")
    (archive,) = target.glob(f"{CHART.name}-*.tgz")
    return archive


def push(archive: Path, charts: str) -> str:
    """Push the archive to `HOST/PATH/charts`; return the digest that the registry gave it."""
    done = _helm("push", str(archive), f"oci://{charts}", *_transport(charts))
    found = re.search(r"^Digest: (sha256:[0-9a-f]{64})$", done, re.MULTILINE)
    if found is None:
        raise LocalError(f"helm push printed no digest: {done.strip()}")
    return found[1]


def published_values(charts: str, version: str) -> Values:
    """Return the values of the chart that was released as this version.

    Raises:
        LocalError: the registry does not have it; the text is Helm's.
    """
    name = f"oci://{charts}/{CHART.name}"
    text = _helm("show", "values", name, f"--version={version}", *_transport(charts))
    values: Values = yaml.safe_load(text)
    return values


def _transport(charts: str) -> list[str]:
    return ["--plain-http"] if references.plain_http(charts) else []


def _helm(*arguments: str) -> str:
    done = attempt(program_path("helm"), *arguments, timeout_s=TIMEOUT_S)
    if done.returncode:
        raise LocalError(
            f"`helm {' '.join(arguments)}` failed with exit code {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout + done.stderr if arguments[0] == "push" else done.stdout
