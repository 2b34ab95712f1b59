"""Copies of images and charts from one registry to another. Digests stay the same.

A manifest is stored after everything that it names. A copy that was cut off can be started again
and transfers only the blobs that are missing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

import aiohttp

from fleetkeeper.adapters.registry.client import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    Manifest,
    Registry,
    RegistryBusy,
    RegistryError,
)
from fleetkeeper.adapters.registry.names import DIGEST, Reference, is_loopback
from fleetkeeper.adapters.registry.referrers import list_referrer

BLOBS_IN_FLIGHT: Final = 4
ATTEMPTS: Final = 3
PAUSE_S: Final = 2.0
"""Pause before the second attempt to copy a blob; twice that before the third."""


@dataclass(slots=True)
class Content:
    """Everything below one name: manifests, children before their index, and the blobs' sizes."""

    manifests: list[Manifest] = field(default_factory=list)
    blobs: dict[str, int] = field(default_factory=dict)
    referrers: list[dict[str, Any]] = field(default_factory=list)
    """Descriptors of the signatures and other artifacts that refer to it; `manifests` has them too."""

    @property
    def size_bytes(self) -> int:
        """The size of all blobs."""
        return sum(self.blobs.values())


@dataclass(slots=True)
class Progress:
    """The progress of a copy; `changed` is called after each blob and each MiB."""

    changed: Callable[[], None] = lambda: None
    copied_bytes: int = 0
    present_bytes: int = 0

    def add(self, copied: int = 0, present: int = 0) -> None:
        """Count bytes that were copied, or that were there before."""
        self.copied_bytes += copied
        self.present_bytes += present
        self.changed()


class Copier:
    """A copier with connections to any number of registries.

    `plain_http` names registries without TLS; those on loopback have none.
    """

    def __init__(self, plain_http: frozenset[str] = frozenset()) -> None:
        self._plain_http = plain_http
        self._registries: dict[str, Registry] = {}
        self._where: dict[tuple[str, str], str] = {}
        self._slots = asyncio.Semaphore(BLOBS_IN_FLIGHT)
        self._session = aiohttp.ClientSession(
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def __aenter__(self) -> Self:
        """Return the copier."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._session.close()

    async def read(self, source: Reference) -> Content:
        """Return what belongs to an image or chart, with what refers to it.

        Raises:
            RegistryError: the registry does not have it, or cannot be read.
        """
        registry, content = self._registry(source.host), Content()
        await self._read(registry, source.repository, source.digest, content)
        for descriptor in await registry.referrers(source.repository, source.digest):
            await self._read(registry, source.repository, descriptor["digest"], content)
            content.referrers.append(descriptor)
        return content

    async def read_blob(self, source: Reference, digest: str) -> bytes:
        """Return a small blob, such as a chart, checked against its digest."""
        registry, content = self._registry(source.host), bytearray()
        async with registry.blob(source.repository, digest) as chunks:
            async for chunk in chunks:
                content += chunk
        _check(registry, source.repository, digest, hashlib.sha256(content).hexdigest())
        return bytes(content)

    async def missing(self, target: Reference, content: Content) -> dict[str, int]:
        """Return the blobs that the target does not have yet, with their sizes."""
        registry = self._registry(target.host)

        async def absent(digest: str) -> bool:
            async with self._slots:
                return not await registry.has_blob(target.repository, digest)

        found = await asyncio.gather(*map(absent, content.blobs))
        return {
            d: size for (d, size), gone in zip(content.blobs.items(), found, strict=True) if gone
        }

    async def copy(
        self, source: Reference, target: Reference, content: Content, progress: Progress
    ) -> None:
        """Copy the content, and read every manifest back from the target.

        Raises:
            RegistryError: a registry refused, or a digest is wrong.
        """
        missing = await self.missing(target, content)
        progress.add(present=content.size_bytes - sum(missing.values()))
        try:
            async with asyncio.TaskGroup() as tasks:
                for digest, size in missing.items():
                    tasks.create_task(self._copy_blob(source, target, digest, size, progress))
        except* RegistryError as problems:
            raise problems.exceptions[0] from None
        registry = self._registry(target.host)
        listing = {
            manifest.digest: await self._store(registry, target, manifest, manifest.digest)
            for manifest in content.manifests
        }
        for descriptor in content.referrers:
            if not listing[descriptor["digest"]]:
                await list_referrer(registry, target, descriptor)
        if target.tag:
            (main,) = (found for found in content.manifests if found.digest == target.digest)
            await self._store(registry, target, main, target.tag)

    def _registry(self, host: str) -> Registry:
        if host not in self._registries:
            plain_http = host in self._plain_http or is_loopback(host)
            self._registries[host] = Registry(self._session, host, plain_http=plain_http)
        return self._registries[host]

    async def _read(
        self, registry: Registry, repository: str, digest: str, content: Content
    ) -> None:
        manifest = await registry.manifest(repository, digest)
        if manifest is None:
            raise RegistryError(
                f"{registry.host} does not have {repository}@{digest}; check the name, and that "
                "your login may read it"
            )
        if manifest.media_type not in MANIFEST_TYPES:
            raise RegistryError(
                f"{registry.host}/{repository}@{digest} has the media type {manifest.media_type!r}, "
                "which cannot be copied by digest"
            )
        document = manifest.document
        if manifest.media_type in INDEX_TYPES:
            for child in document["manifests"]:
                await self._read(registry, repository, child["digest"], content)
        else:
            content.blobs.update(_blobs(document))
        content.manifests.append(manifest)

    async def _copy_blob(
        self, source: Reference, target: Reference, digest: str, size: int, progress: Progress
    ) -> None:
        """Copy a blob; try again after a failure that may pass."""
        async with self._slots:
            other = self._where.get((target.host, digest))
            registry = self._registry(target.host)
            if other and await registry.mount_blob(target.repository, digest, other):
                progress.add(present=size)
                return
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    await self._transfer(source, target, digest, size, progress)
                    break
                except RegistryBusy:
                    if attempt == ATTEMPTS:
                        raise
                await asyncio.sleep(PAUSE_S * attempt)
            self._where[target.host, digest] = target.repository

    async def _transfer(
        self, source: Reference, target: Reference, digest: str, size: int, progress: Progress
    ) -> None:
        summed, sent = hashlib.sha256(), 0
        sender = self._registry(source.host)

        async def counted(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            nonlocal sent
            async for chunk in chunks:
                summed.update(chunk)
                sent += len(chunk)
                progress.add(copied=len(chunk))
                yield chunk

        try:
            async with sender.blob(source.repository, digest) as chunks:
                await self._registry(target.host).put_blob(
                    target.repository, digest, size, counted(chunks)
                )
        except RegistryError:
            progress.add(copied=-sent)
            if sent >= size:
                _check(sender, source.repository, digest, summed.hexdigest())
            raise
        _check(sender, source.repository, digest, summed.hexdigest())

    async def _store(
        self, registry: Registry, target: Reference, manifest: Manifest, reference: str
    ) -> bool:
        """Store a manifest and read it back; return whether the registry lists what refers to what."""
        lists = await registry.put_manifest(target.repository, reference, manifest)
        kept = await registry.manifest(target.repository, reference)
        if kept is None or kept.digest != manifest.digest:
            raise RegistryError(
                f"{target.name} answered for {reference} with "
                f"{kept.digest if kept else 'nothing'} after {manifest.digest} was stored there; "
                "use a registry that keeps manifests unchanged"
            )
        return lists


def _blobs(document: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for blob in (document["config"], *document["layers"]):
        if not DIGEST.fullmatch(blob["digest"]):
            raise RegistryError(
                f"the digest {blob['digest']!r} is not sha256, the one that is supported"
            )
        yield blob["digest"], int(blob["size"])


def _check(registry: Registry, repository: str, digest: str, found: str) -> None:
    if digest != f"sha256:{found}":
        raise RegistryError(
            f"{registry.host}/{repository} sent content of sha256:{found} for the blob {digest}; "
            "do not use this registry"
        )
