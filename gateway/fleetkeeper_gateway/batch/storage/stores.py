"""The store that the settings name."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store

from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage.batches import StoredBatches
from fleetkeeper_gateway.batch.storage.errors import StoreRefused, reason_of
from fleetkeeper_gateway.batch.storage.files import StoredFiles
from fleetkeeper_gateway.batch.storage.local import LocalObjects
from fleetkeeper_gateway.batch.storage.paths import BadPart, checked
from fleetkeeper_gateway.batch.storage.records import Records
from fleetkeeper_gateway.batch.storage.remote import RemoteObjects
from fleetkeeper_gateway.batch.storage.sweeper import Sweeper

VARIABLE: Final = "FLEETKEEPER_GATEWAY_BATCH_STORE"
ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
"""Environment variables with the endpoint of another provider than Amazon or Google."""
DAY_S: Final = 86_400.0
CREATED_AT_ONCE: Final = 16
"""Concurrent calls that create the same object in the check of the store."""


@dataclass(frozen=True)
class Storage:
    """A store, with its files and batches."""

    objects: LocalObjects | RemoteObjects
    files: StoredFiles
    batches: StoredBatches
    sweeper: Sweeper

    async def check(self) -> None:
        """Check that the store is writable, and that an object can be created only once.

        Raises:
            StorageError: if the store cannot be reached, or refuses.
            StoreRefused: if it replaces an existing object, or if several concurrent creations succeed.
                Then a line could have two results.
        """
        path = f"check/{secrets.token_hex(16)}"
        contents = [str(number).encode() for number in range(CREATED_AT_ONCE)]
        try:
            together = await asyncio.gather(
                *(self.objects.create(path, content) for content in contents),
                return_exceptions=True,
            )
            for outcome in together:
                if isinstance(outcome, BaseException):
                    raise outcome
            kept = await self.objects.read(path)
            later = await self.objects.create(path, b"later")
        finally:
            await self.objects.delete([path])
        winners = [content for content, won in zip(contents, together, strict=True) if won]
        if winners != [kept] or later:
            raise StoreRefused(
                "the store does not refuse to create an object that exists (If-None-Match). "
                f"Correct {VARIABLE}, or use a newer version of the store"
            )

    def close(self) -> None:
        """End the threads, and release the directory. All writes must have ended."""
        if isinstance(self.objects, LocalObjects):
            self.objects.close()


def create_storage(settings: BatchSettings, *, wall: Callable[[], float] = time.time) -> Storage:
    """Return the store of the settings, without a call to it: see `Storage.check`.

    Raises:
        StoreRefused: if the settings name no store, or another process uses the directory.
    """
    url = urlsplit(settings.batch_store)
    objects = _directory(url, settings) if url.scheme == "file" else _bucket(url, settings)
    records = Records(objects)
    retention_s = settings.batch_retention_days * DAY_S
    files = StoredFiles(objects, records, retention_s=retention_s, wall=wall)
    batches = StoredBatches(objects, records)
    sweeper = Sweeper(objects, records, files, batches, retention_s=retention_s)
    return Storage(objects, files, batches, sweeper)


def _directory(url: SplitResult, settings: BatchSettings) -> LocalObjects:
    root = Path(unquote(url.path))
    if url.netloc or url.query or url.fragment or not root.is_absolute() or root == Path("/"):
        raise StoreRefused(f"{VARIABLE} must be like file:///var/lib/fleetkeeper/batch")
    timeout_s, shared = settings.batch_store_timeout_seconds, settings.batch_store_shared
    try:
        return LocalObjects(root, timeout_s, shared=shared)
    except OSError as error:
        raise StoreRefused(
            f"the directory {root} of {VARIABLE} cannot be used: {reason_of(error)}"
        ) from error


def _bucket(url: SplitResult, settings: BatchSettings) -> RemoteObjects:
    prefix = url.path.strip("/")
    # Not quoted in messages: it may contain a password.
    if url.scheme not in {"s3", "gs"} or not url.netloc or "@" in url.netloc:
        raise StoreRefused(
            f"{VARIABLE} must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///DIRECTORY; "
            "credentials are in the variables of their own"
        )
    if url.query or url.fragment:
        raise StoreRefused(f"{VARIABLE} must end with the prefix, without ? and #")
    try:
        checked(prefix or "x")
        timeout_s = settings.batch_store_timeout_seconds
        kind = S3Store if url.scheme == "s3" else GCSStore
        store = kind(
            url.netloc,
            prefix=prefix or None,
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
                # A URL with http:// is an explicit choice.
                "allow_http": any(
                    os.environ.get(name, "").startswith("http://") for name in ENDPOINTS
                ),
            },
            # Retries until half of a call's time is over, so that the last retry can end.
            retry_config={
                "max_retries": 10,
                "retry_timeout": timedelta(seconds=timeout_s / 2),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.1),
                    "max_backoff": timedelta(seconds=max(0.2, timeout_s / 10)),
                    "base": 2,
                },
            },
        )
    except BadPart as error:
        raise StoreRefused(f"{VARIABLE}: {error}. Use letters, digits, dot, dash and _") from error
    except (BaseError, ValueError) as error:
        raise StoreRefused(f"the store of {VARIABLE} cannot be used: {reason_of(error)}") from error
    place = "/".join(part for part in (f"{url.scheme}://{url.netloc}", prefix) if part)
    return RemoteObjects(store, place, timeout_s)
