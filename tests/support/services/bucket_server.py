"""A bucket on loopback that speaks to clients of S3 and of Google Cloud Storage, and fails as it is told.

What the object stores of both promise and obstore uses: conditional puts, ranges, lists in pages, parts
of an upload, deletes of one or many, metadata. Credentials are not looked at.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from enum import Enum, auto
from hashlib import md5
from typing import Final
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

BUCKET: Final = "batches"
PREFIX: Final = "team/one"
MAX_BYTES: Final = 1024**3
METADATA: Final = ("x-amz-meta-", "x-goog-meta-")


class Fault(Enum):
    """What happens to a request."""

    ERROR = auto()
    """It is answered with 500. Nothing else happens."""
    LOST = auto()
    """It is done, and answered with 500."""
    RESET = auto()
    """The connection is closed. Nothing else happens."""
    RESET_AFTER = auto()
    """It is done, and the connection is closed without an answer."""
    SILENT = auto()
    """It is done, and never answered."""
    FORBIDDEN = auto()
    """It is answered with 403."""
    CONFLICT = auto()
    """It is answered with 409, as S3 does if a conditional write meets another one. Nothing else happens."""


REFUSALS: Final = {
    Fault.ERROR: (500, "InternalError"),
    Fault.FORBIDDEN: (403, "AccessDenied"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
}


@dataclass
class _Plan:
    method: str
    part: str
    fault: Fault
    times: int


@dataclass
class StoredObject:
    """An object of the bucket."""

    data: bytes
    metadata: dict[str, str] = field(default_factory=dict)
    modified: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    headers: dict[str, str] = field(init=False)
    """What every answer about it says."""

    def __post_init__(self) -> None:
        """Make the headers once: their hash takes a while."""
        self.headers = {
            "ETag": f'"{md5(self.data).hexdigest()}"',
            "Last-Modified": format_datetime(self.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            **self.metadata,
        }


@dataclass
class BucketServer:
    """The bucket, and what was asked of it."""

    page_keys: int = 1000
    """Most objects of one page of a list."""
    port: int = 0
    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request, faulty ones too."""
    replaces: bool = False
    """Whether it ignores that an object must not exist, as old stores do."""
    silenced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request was not answered."""
    _plans: list[_Plan] = field(default_factory=list)
    _ends: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Return the address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables with which clients of both kinds find it."""
        account = {
            "gcs_base_url": self.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key-of-a-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
            "AWS_REGION": "eu-central-1",
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            "GOOGLE_BASE_URL": self.url,
        }

    def fail(self, method: str, fault: Fault, *, part: str = "", times: int = 1) -> None:
        """Let the next requests of a method fail whose path and query contain a text."""
        self._plans.append(_Plan(method, part, fault, times))

    def heal(self) -> None:
        """Forget the faults that have not come."""
        self._plans.clear()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[BucketServer]:
        """Serve on a free port."""
        application = web.Application(client_max_size=MAX_BYTES)
        application.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        try:
            await site.start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            self._ends.set()
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        whole = f"{unquote(request.rel_url.raw_path)}?{request.query_string}"
        self.requests.append(f"{request.method} {whole}")
        fault = self._fault_of(request.method, whole)
        if fault in REFUSALS:
            status, code = REFUSALS[fault]
            return web.Response(status=status, text=f"<Error><Code>{code}</Code></Error>")
        if fault is Fault.RESET:
            return self._reset(request)
        answer = await self._answer(request)
        if fault is Fault.LOST:
            return web.Response(status=500, text="<Error><Code>InternalError</Code></Error>")
        if fault is Fault.RESET_AFTER:
            return self._reset(request)
        if fault is Fault.SILENT:
            self.silenced.set()
            await self._ends.wait()
        return answer

    def _fault_of(self, method: str, whole: str) -> Fault | None:
        for plan in self._plans:
            if plan.times and plan.method == method and plan.part in whole:
                plan.times -= 1
                return plan.fault
        return None

    @staticmethod
    def _reset(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response(status=500)

    async def _answer(self, request: web.Request) -> web.Response:
        bucket, _, key = unquote(request.rel_url.raw_path).lstrip("/").partition("/")
        if bucket != BUCKET:
            return web.Response(status=404, text="<Error><Code>NoSuchBucket</Code></Error>")
        if not key:
            return await self._of_bucket(request)
        if "uploadId" in request.query or "uploads" in request.query:
            return await self._multipart(request, key)
        if request.method == "PUT":
            return self._put(request, key, await request.read())
        if request.method == "DELETE":
            existed = self.objects.pop(key, None) is not None
            is_s3 = "x-amz-date" in request.headers
            return web.Response(status=204 if existed or is_s3 else 404)
        return self._get(request, key)

    async def _of_bucket(self, request: web.Request) -> web.Response:
        if request.method == "POST" and "delete" in request.query:
            return await self._delete_many(request)
        return self._list(request)

    def _put(self, request: web.Request, key: str, data: bytes) -> web.Response:
        must_be_new = (
            request.headers.get("If-None-Match") == "*"
            or request.headers.get("x-goog-if-generation-match") == "0"
        )
        if must_be_new and key in self.objects and not self.replaces:
            return web.Response(status=412, text="<Error><Code>PreconditionFailed</Code></Error>")
        metadata = {
            name.lower(): value
            for name, value in request.headers.items()
            if name.lower().startswith(METADATA)
        }
        self.objects[key] = StoredObject(data, metadata)
        return web.Response(headers={"ETag": self.objects[key].headers["ETag"]})

    def _get(self, request: web.Request, key: str) -> web.Response:
        found = self.objects.get(key)
        if found is None:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        wanted = request.headers.get("Range")
        if wanted is None:
            # aiohttp leaves out the length of an answer to HEAD that is empty.
            size = {"Content-Length": str(len(found.data))}
            return web.Response(body=found.data, headers={**found.headers, **size})
        first, last = (int(one) for one in wanted.removeprefix("bytes=").split("-"))
        if first >= len(found.data):
            return web.Response(status=416)
        part = found.data[first : last + 1]
        place = f"bytes {first}-{first + len(part) - 1}/{len(found.data)}"
        return web.Response(
            status=206, body=part, headers={**found.headers, "Content-Range": place}
        )

    async def _multipart(self, request: web.Request, key: str) -> web.Response:
        if "uploads" in request.query:
            upload = secrets.token_hex(8)
            self.uploads[upload] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        parts = self.uploads[request.query["uploadId"]]
        if request.method == "PUT":
            data = await request.read()
            parts[int(request.query["partNumber"])] = data
            return web.Response(headers={"ETag": f'"{md5(data).hexdigest()}"'})
        del self.uploads[request.query["uploadId"]]
        if request.method == "DELETE":
            return web.Response(status=204)
        self.objects[key] = StoredObject(b"".join(parts[number] for number in sorted(parts)))
        tag = escape(self.objects[key].headers["ETag"])
        return _xml("CompleteMultipartUploadResult", f"<ETag>{tag}</ETag>")

    def _list(self, request: web.Request) -> web.Response:
        prefix = request.query.get("prefix", "")
        after = max(
            request.query.get("start-after", ""), request.query.get("continuation-token", "")
        )
        delimiter = request.query.get("delimiter", "")
        names = [name for name in sorted(self.objects) if name.startswith(prefix) and name > after]
        page, more = names[: self.page_keys], len(names) > self.page_keys
        folders, content = set(), []
        for name in page:
            folder, slash, _ = name.removeprefix(prefix).partition(delimiter or "\0")
            if slash:
                folders.add(prefix + folder + slash)
                continue
            one = self.objects[name]
            content.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(one.data)}</Size>"
                f"<LastModified>{one.modified.isoformat()}</LastModified>"
                f"<ETag>{escape(one.headers['ETag'])}</ETag></Contents>"
            )
        content += [
            f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in sorted(folders)
        ]
        if more:
            content.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        return _xml("ListBucketResult", "".join(content))

    async def _delete_many(self, request: web.Request) -> web.Response:
        names = [
            str(element.text)
            for element in ET.fromstring(await request.text()).iter()
            if element.tag.endswith("Key")
        ]
        for name in names:
            self.objects.pop(name, None)
        deleted = (f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return _xml("DeleteResult", "".join(deleted))


def _xml(name: str, content: str) -> web.Response:
    return web.Response(text=f"<{name}>{content}</{name}>", content_type="application/xml")
