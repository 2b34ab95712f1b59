"""The bill of an image: which packages it names, and that CycloneDX's own schema accepts it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.release import sbom

pytestmark = pytest.mark.exhaustive

IMAGE = f"r.example.com:5000/x/fleetkeeper-engine@sha256:{'a' * 64}"
WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STATUS = b"""Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc (2.36-9)
Version: 2.36-9+deb12u8
Description: a library
 with a second line
 .
 Package: not-a-package

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1
"""
RELEASE = b'PRETTY_NAME="Debian"\nVERSION_ID="12"\nID=debian\n'
METADATA = b"""Metadata-Version: 2.4
Name: PyYAML
Version: 6.0.3
License-Expression: MIT

Name: not-this-one
"""
SITE = "opt/venv/lib/python3.11/site-packages"
LISTS = {
    "var/lib/dpkg/status": STATUS,
    "usr/lib/os-release": RELEASE,
    f"{SITE}/pyyaml-6.0.3.dist-info/METADATA": METADATA,
    "usr/lib/python3/dist-packages/pyyaml-6.0.3.dist-info/METADATA": METADATA,
}


def _bill(lists: dict[str, bytes]) -> dict[str, Any]:
    text = sbom.write(IMAGE, "1.0.0", lists, WHEN)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document: dict[str, Any] = json.loads(text)
    return document


def test_debian_and_python_packages_are_named_once_with_what_scanners_look_up() -> None:
    document = _bill(LISTS)
    assert {part["purl"] for part in document["components"]} == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u8?arch=amd64&distro=debian-12&upstream=glibc",
        "pkg:pypi/pyyaml@6.0.3",
    }
    licenses = {part["name"]: part.get("licenses") for part in document["components"]}
    assert licenses == {"libc6": None, "PyYAML": [{"license": {"id": "MIT"}}]}


def test_the_bill_is_about_the_image_by_digest_and_depends_on_every_part() -> None:
    document = _bill(LISTS)
    about = document["metadata"]["component"]
    assert (about["type"], about["version"]) == ("container", "1.0.0")
    assert f"sha256:{'a' * 64}" in about["purl"]
    (edges,) = (e for e in document["dependencies"] if e["ref"] == about["bom-ref"])
    assert set(edges["dependsOn"]) == {part["bom-ref"] for part in document["components"]}


def test_the_same_image_gives_the_same_bill() -> None:
    other = dict(reversed(LISTS.items()))
    assert sbom.write(IMAGE, "1.0.0", LISTS, WHEN) == sbom.write(IMAGE, "1.0.0", other, WHEN)


@pytest.mark.parametrize("text", ["MIT OR Apache-2.0", "3-clause BSD", "A" * 101, "two\n  lines"])
def test_a_license_in_any_form_leaves_the_bill_valid(text: str) -> None:
    metadata = f"Name: a\nVersion: 1\nLicense: {text}\n\n".encode()
    (part,) = _bill({"a-1.dist-info/METADATA": metadata})["components"]
    assert ("licenses" in part) == (len(text) < 100 and "\n" not in text)


def test_an_image_without_packages_has_an_empty_bill() -> None:
    assert _bill({}).get("components", []) == []


def test_a_list_that_cannot_be_read_names_the_image() -> None:
    with pytest.raises(LocalError, match=r"cannot write the SBOM of r\.example\.com"):
        sbom.write(IMAGE, "1.0.0", {"a-1.dist-info/METADATA": b"Version: 1\n\n"}, WHEN)


def test_its_file_has_the_name_of_the_image() -> None:
    assert sbom.file_name(IMAGE) == "fleetkeeper-engine.cdx.json"
