"""Files that a registry keeps beside an image and that name it as their subject, such as an SBOM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp

from fleetkeeper.adapters.registry.client import (
    INDEX_TYPES,
    OCI_MANIFEST_TYPE,
    Manifest,
    Registry,
    RegistryError,
    referrers_tag,
)
from fleetkeeper.adapters.registry.names import Reference, digest_of, is_loopback

EMPTY: Final = b"{}"
EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"


async def attach(subject: Reference, media_type: str, name: str, content: bytes) -> str:
    """Store a file that refers to an image in its registry; return the artifact's digest.

    The same file for the same image is the same artifact.

    Raises:
        RegistryError: the registry does not have the image, or refused.
    """
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        registry = Registry(session, subject.host, plain_http=is_loopback(subject.host))
        about = await registry.manifest(subject.repository, subject.digest)
        if about is None:
            raise RegistryError(
                f"{subject.host} does not have {subject.repository}@{subject.digest}"
            )
        for blob in (EMPTY, content):
            if not await registry.has_blob(subject.repository, digest_of(blob)):
                await registry.put_blob(
                    subject.repository, digest_of(blob), len(blob), _chunks(blob)
                )
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST_TYPE,
            "artifactType": media_type,
            "config": _descriptor(EMPTY, EMPTY_TYPE),
            "layers": [
                {
                    **_descriptor(content, media_type),
                    "annotations": {"org.opencontainers.image.title": name},
                }
            ],
            "subject": _descriptor(about.content, about.media_type),
        }
        manifest = Manifest(json.dumps(document).encode(), OCI_MANIFEST_TYPE)
        if not await registry.put_manifest(subject.repository, manifest.digest, manifest):
            entry = _descriptor(manifest.content, OCI_MANIFEST_TYPE)
            await list_referrer(registry, subject, {**entry, "artifactType": media_type})
        return manifest.digest


async def list_referrer(registry: Registry, subject: Reference, descriptor: dict[str, Any]) -> None:
    """Add an artifact to the list that a registry without one keeps as an index under a tag."""
    listed = await registry.referrers(subject.repository, subject.digest)
    if descriptor["digest"] in {known["digest"] for known in listed}:
        return
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPES[0],
        "manifests": [*listed, descriptor],
    }
    manifest = Manifest(json.dumps(index).encode(), INDEX_TYPES[0])
    await registry.put_manifest(subject.repository, referrers_tag(subject.digest), manifest)


def _descriptor(content: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}


async def _chunks(content: bytes) -> AsyncIterator[bytes]:
    yield content
