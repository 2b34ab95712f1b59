"""Software bills of materials of our images, as CycloneDX: Debian and Python packages."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from email import message_from_string
from email.message import Message

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.exception import CycloneDxException
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.release import references

MEDIA_TYPE = "application/vnd.cyclonedx+json"
MAX_LICENSE_CHARACTERS = 100
"""A longer `License` field is the text of a license, not its name."""


def write(image: str, version: str, lists: Mapping[str, bytes], created: datetime) -> str:
    """Return the bill of an image as JSON. The same image and time give the same text.

    Args:
        image: `HOST/NAME@sha256:...`.
        version: the release.
        lists: the image's package lists (`contents.read_lists`).
        created: the time that the bill has.

    Raises:
        LocalError: a list is not valid, or the bill does not match CycloneDX's schema.
    """
    try:
        bom = _bom(image, version, lists, created)
        text = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    except (CycloneDxException, ValueError, KeyError) as error:
        raise LocalError(f"cannot write the SBOM of {image}: {error}") from error
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise LocalError(f"the SBOM of {image} does not match the schema of CycloneDX: {problem}")
    return text


def _bom(image: str, version: str, lists: Mapping[str, bytes], created: datetime) -> Bom:
    name, _, digest = image.partition("@")
    short = name.rpartition("/")[2]
    purl = PackageURL(
        "oci", name=short, version=digest, qualifiers={"repository_url": name, "tag": version}
    )
    root = Component(
        name=short, type=ComponentType.CONTAINER, version=version, purl=purl, bom_ref=str(purl)
    )
    # A package that lies in two places is one component.
    parts = {str(part.purl): part for part in (*_debian(lists), *_python(lists))}
    bom = Bom(components=parts.values(), serial_number=uuid.uuid5(uuid.NAMESPACE_URL, image))
    bom.metadata.component, bom.metadata.timestamp = root, created
    bom.register_dependency(root, parts.values())
    return bom


def _debian(lists: Mapping[str, bytes]) -> Iterator[Component]:
    system = dict(
        line.split("=", 1)
        for line in _text(lists.get("usr/lib/os-release", b"")).splitlines()
        if "=" in line
    )
    distribution = system.get("ID", "debian").strip('"')
    release = f"{distribution}-{system.get('VERSION_ID', '').strip(chr(34))}".rstrip("-")
    for path, content in sorted(lists.items()):
        if not path.startswith("var/lib/dpkg/"):
            continue
        for paragraph in filter(str.strip, _text(content).split("\n\n")):
            package = message_from_string(paragraph.lstrip("\n"))
            # A removed package stays in the list while its configuration does.
            if package.get("Status", "install ok installed").endswith(" installed"):
                yield _debian_package(package, distribution, release)


def _debian_package(package: Message, distribution: str, release: str) -> Component:
    source = (package.get("Source") or "").partition(" ")[0]
    qualifiers = {"arch": package["Architecture"], "distro": release, "upstream": source}
    purl = PackageURL(
        type="deb",
        namespace=distribution,
        name=package["Package"],
        version=package["Version"],
        qualifiers=qualifiers,
    )
    return Component(
        name=package["Package"],
        version=package["Version"],
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=str(purl),
    )


def _python(lists: Mapping[str, bytes]) -> Iterator[Component]:
    for path, content in sorted(lists.items()):
        if not path.endswith(("/METADATA", "/PKG-INFO")):
            continue
        package = message_from_string(_text(content).partition("\n\n")[0])
        purl = PackageURL("pypi", name=package["Name"], version=package["Version"])
        license_name = package.get("License-Expression") or package.get("License") or ""
        named = "\n" not in license_name and 0 < len(license_name) <= MAX_LICENSE_CHARACTERS
        yield Component(
            name=package["Name"],
            version=package["Version"],
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=str(purl),
            licenses=[LicenseFactory().make_from_string(license_name)] if named else (),
        )


def _text(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def file_name(image: str) -> str:
    """Return the name of the bill's file: `NAME.cdx.json`."""
    return f"{references.without_tag(image).rpartition('/')[2]}.cdx.json"
