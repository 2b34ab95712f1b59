"""Names of images and charts in registries, always with a digest."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Final, Self

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HOST: Final = r"(?:localhost|[\w-]+(?:\.[\w-]+)+|\[[0-9a-fA-F:]+\]|[\w-]+(?=:\d))(?::\d+)?"
_PATH: Final = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
_NAME: Final = re.compile(rf"({_HOST})/({_PATH})(?::([\w][\w.-]{{0,127}}))?@({DIGEST.pattern})")
_PLACE: Final = re.compile(rf"({_HOST})(?:/({_PATH}))?")


@dataclass(frozen=True, slots=True)
class Reference:
    """An image or chart: `HOST/REPOSITORY[:TAG]@sha256:...`."""

    host: str
    repository: str
    digest: str
    tag: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the reference; raise `ValueError` if it has no registry or no digest."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not HOST/NAME@sha256:DIGEST")
        host, repository, tag, digest = found.groups()
        return cls(host, repository, digest, tag or "")

    def at(self, place: Place) -> Reference:
        """Return the name of the same content below another registry and path."""
        repository = "/".join(filter(None, (place.path, self.repository)))
        return replace(self, host=place.host, repository=repository)

    @property
    def name(self) -> str:
        """Registry and repository, without tag and digest."""
        return f"{self.host}/{self.repository}"

    def __str__(self) -> str:
        """Return the name by which a container runtime pulls it."""
        return f"{self.name}{f':{self.tag}' if self.tag else ''}@{self.digest}"


@dataclass(frozen=True, slots=True)
class Place:
    """A registry, and the path below which names go: `HOST[/PATH]`."""

    host: str
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the place; raise `ValueError` if the text is none."""
        found = _PLACE.fullmatch(text.rstrip("/"))
        if found is None:
            raise ValueError(f"{text!r} is not HOST or HOST/PATH (lower case, no scheme)")
        return cls(found[1], found[2] or "")


def digest_of(content: bytes) -> str:
    """Return `sha256:...` of the content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def is_loopback(host: str) -> bool:
    """Return whether the registry is on this machine, where it has no TLS."""
    name = re.sub(r":\d+$", "", host)
    if name == "localhost":
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
