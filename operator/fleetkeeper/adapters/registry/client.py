"""The HTTP API of a registry, as far as a copy needs it.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from fleetkeeper.adapters.registry.logins import DOCKER_HUB, BadLogin, find_login
from fleetkeeper.adapters.registry.names import DIGEST, digest_of

INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
OCI_MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_TYPES: Final = (
    *INDEX_TYPES,
    OCI_MANIFEST_TYPE,
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_MANIFEST_BYTES: Final = 4 * 1024 * 1024
"""The size that the specification asks registries to accept."""
CHUNK_BYTES: Final = 1024 * 1024
TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=300)
"""A blob takes as long as it takes. Only a pause is an error; a registry checks a large blob at its end."""
NOT_FOUND: Final = 404
UNAUTHORIZED: Final = (401, 403)
BUSY: Final = (429, 500, 502, 503, 504)
_PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')


class RegistryError(Exception):
    """A refusal of a registry. The message says what was asked, of whom, and what to do."""


class RegistryBusy(RegistryError):
    """A failure that may pass: no connection, a timeout, or an answer such as 503."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest or index as the registry has it, and its media type."""

    content: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """The digest of the content."""
        return digest_of(self.content)

    @property
    def document(self) -> dict[str, Any]:
        """The parsed content."""
        document: dict[str, Any] = json.loads(self.content)
        return document


class Registry:
    """One registry. `plain_http` says that it has no TLS."""

    def __init__(self, session: aiohttp.ClientSession, host: str, *, plain_http: bool) -> None:
        self.host = host
        api = "registry-1.docker.io" if host == DOCKER_HUB else host
        self._base = URL(f"{'http' if plain_http else 'https'}://{api}")
        self._session = session
        proxied = not proxy_bypass(self._base.host or "")
        self._proxy = getproxies().get(self._base.scheme) if proxied else None
        self._headers: dict[tuple[str, bool], str] = {}
        self._login = asyncio.Lock()

    async def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest by tag or digest; None if the registry does not have it.

        Raises:
            RegistryError: it cannot be read, is too large, or is not what its digest says.
        """
        url = self._url(repository, "manifests", reference)
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        async with self._ask("GET", url, repository, headers=headers) as response:
            if response.status == NOT_FOUND:
                return None
            await self._expect(response, 200)
            content = await _read(response)
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        found = Manifest(content, media_type)
        if DIGEST.fullmatch(reference) and found.digest != reference:
            raise RegistryError(
                f"{self.host} answered for {repository}@{reference} with the content of "
                f"{found.digest}; do not use this registry"
            )
        return found

    async def put_manifest(self, repository: str, reference: str, manifest: Manifest) -> bool:
        """Store a manifest; return whether the registry keeps a list of what refers to what."""
        url = self._url(repository, "manifests", reference)
        headers = {"Content-Type": manifest.media_type}
        async with self._ask(
            "PUT", url, repository, headers=headers, data=manifest.content
        ) as response:
            await self._expect(response, 201)
            return "OCI-Subject" in response.headers

    async def referrers(self, repository: str, digest: str) -> list[dict[str, Any]]:
        """Return the descriptors of signatures and other artifacts that refer to a manifest."""
        async with self._ask(
            "GET", self._url(repository, "referrers", digest), repository
        ) as response:
            # Who does not know this question answers 404, or a page for people.
            known = response.status == 200 and response.content_type == INDEX_TYPES[0]
            listed = await _parsed(response) if known else None
        if listed is None:
            index = await self.manifest(repository, referrers_tag(digest))
            listed = index.document if index else {}
        return list(listed.get("manifests") or ())

    async def has_blob(self, repository: str, digest: str) -> bool:
        """Return whether the repository has this blob."""
        async with self._ask(
            "HEAD", self._url(repository, "blobs", digest), repository
        ) as response:
            if response.status == NOT_FOUND:
                return False
            await self._expect(response, 200)
            return True

    @asynccontextmanager
    async def blob(self, repository: str, digest: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield a blob's content in chunks. The caller checks its digest."""
        async with self._ask("GET", self._url(repository, "blobs", digest), repository) as response:
            await self._expect(response, 200)
            yield response.content.iter_chunked(CHUNK_BYTES)

    async def mount_blob(self, repository: str, digest: str, other: str) -> bool:
        """Let the repository share a blob of another one; return False if the registry does not."""
        url = self._uploads(repository).update_query({"mount": digest, "from": other})
        async with self._ask("POST", url, repository) as response:
            return response.status == 201

    async def put_blob(
        self, repository: str, digest: str, size: int, content: AsyncIterator[bytes]
    ) -> None:
        """Store a blob, which the registry checks against its digest."""
        uploads = self._uploads(repository)
        async with self._ask("POST", uploads, repository) as response:
            if response.status == NOT_FOUND:
                raise RegistryError(
                    f"{self.host} has no repository {repository} and does not create it; create it, "
                    "then run the command again"
                )
            await self._expect(response, 202)
            location = uploads.join(URL(response.headers.get("Location", ""), encoded=True))
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        url = location.update_query({"digest": digest})
        async with self._ask("PUT", url, repository, headers=headers, data=content) as response:
            await self._expect(response, 201)

    def _url(self, repository: str, kind: str, reference: str) -> URL:
        return self._base / "v2" / repository / kind / reference

    def _uploads(self, repository: str) -> URL:
        return self._base / "v2" / repository / "blobs" / "uploads" / ""

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        url: URL,
        repository: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: bytes | AsyncIterator[bytes] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response, after a login if the registry asks for one."""
        key = (repository, method in {"GET", "HEAD"})
        before = self._headers.get(key)
        try:
            response = await self._send(method, url, key, headers, data)
            if response.status == 401:
                challenge = response.headers.get("WWW-Authenticate", "")
                response.release()
                async with self._login:  # one token serves all requests that wait for it
                    if self._headers.get(key) == before:
                        self._headers[key] = await self._authorize(challenge, repository)
                if isinstance(data, AsyncIterator):
                    raise RegistryBusy(f"the login to {self.host} ended; try again")
                response = await self._send(method, url, key, headers, data)
            async with response:
                yield response
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise RegistryBusy(
                f"{method} {url.with_query(None)} failed: {problem or 'timeout'}; check the name of "
                "the registry and the network, then run the command again"
            ) from problem

    async def _send(
        self,
        method: str,
        url: URL,
        key: tuple[str, bool],
        headers: Mapping[str, str] | None,
        data: bytes | AsyncIterator[bytes] | None,
    ) -> aiohttp.ClientResponse:
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        # The address of an upload may be on another host, which gets no credentials of this one.
        if key in self._headers and url.origin() == self._base.origin():
            sent["Authorization"] = self._headers[key]
        return await self._session.request(
            method, url, headers=sent, data=data, proxy=self._proxy, timeout=TIMEOUT
        )

    async def _authorize(self, challenge: str, repository: str) -> str:
        """Return the `Authorization` header that answers a challenge."""
        scheme, _, rest = challenge.partition(" ")
        try:
            login = await asyncio.to_thread(find_login, self.host, repository)
        except BadLogin as problem:
            raise RegistryError(str(problem)) from None
        if scheme.lower() == "basic":
            if login is None:
                raise RegistryError(f"{self.host} needs a login; {self._advice()}")
            return login.basic
        parameters = dict(_PARAMETER.findall(rest))
        realm = URL(parameters.get("realm", ""))
        if scheme.lower() != "bearer" or not realm.is_absolute():
            raise RegistryError(f"{self.host} asks for a login in an unknown way: {challenge!r}")
        if self._base.scheme == "https" and realm.scheme != "https":
            raise RegistryError(f"{self.host} sends logins to {realm}, which has no TLS")
        query = {name: parameters[name] for name in ("service", "scope") if name in parameters}
        headers = {"Authorization": login.basic} if login else {}
        async with self._session.get(
            realm.update_query(query), headers=headers, proxy=self._proxy, timeout=TIMEOUT
        ) as response:
            await self._expect(response, 200)
            answer = await _parsed(response)
        token = answer.get("token") or answer.get("access_token")
        if not token:
            raise RegistryError(f"{realm} answered without a token; {self._advice()}")
        return f"Bearer {token}"

    async def _expect(self, response: aiohttp.ClientResponse, status: int) -> None:
        """Raise an error unless the response has this status."""
        if response.status == status:
            return
        detail = (await response.content.read(MAX_MANIFEST_BYTES)).decode(errors="replace").strip()
        text = (
            f"{response.method} {response.url.with_query(None)} failed with HTTP status "
            f"{response.status}{f': {detail[:300]}' if detail else ''}"
        )
        if response.status in UNAUTHORIZED:
            text = f"{text}; check your rights, or {self._advice()}"
        raise (RegistryBusy if response.status in BUSY else RegistryError)(text)

    def _advice(self) -> str:
        return f"log in: docker login {self.host}, or skopeo login {self.host}"


def referrers_tag(digest: str) -> str:
    """Return the tag under which registries without a list of referrers keep one."""
    return digest.replace(":", "-")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        content += chunk
        if len(content) > MAX_MANIFEST_BYTES:
            raise RegistryError(f"{response.url.with_query(None)} is larger than 4 MiB")
    return bytes(content)


async def _parsed(response: aiohttp.ClientResponse) -> dict[str, Any]:
    content = await _read(response)
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise RegistryError(f"{response.url.with_query(None)} did not answer with a JSON object")
    return document
