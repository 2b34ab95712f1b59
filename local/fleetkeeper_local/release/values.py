"""The images that the chart's values name, by tag in the checkout and by digest in a release."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import yaml

from fleetkeeper_local.common.errors import LocalError

Values = dict[str, Any]
FIELDS = ("image", "injectedImage")
"""The fields of an engine profile that name images."""


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
