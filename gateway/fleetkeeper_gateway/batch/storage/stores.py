"""The store that the settings name."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store

from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage.batches import StoredBatches
from fleetkeeper_gateway.batch.storage.durable import make_folders
from fleetkeeper_gateway.batch.storage.errors import StoreRefused, reason_of
from fleetkeeper_gateway.batch.storage.files import StoredFiles
from fleetkeeper_gateway.batch.storage.local import DirectoryLock, LocalObjects
from fleetkeeper_gateway.batch.storage.paths import BadPart, checked
from fleetkeeper_gateway.batch.storage.records import Records
from fleetkeeper_gateway.batch.storage.remote import RemoteObjects
from fleetkeeper_gateway.batch.storage.sweeper import Sweeper

if TYPE_CHECKING:
    # Only the stubs have them.
    from obstore.store import ClientConfig, RetryConfig

VARIABLE: Final = "FLEETKEEPER_GATEWAY_BATCH_STORE"
ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
"""Variables with an address other than that of Amazon or Google."""
DAY_S: Final = 86_400.0


@dataclass(frozen=True)
class Storage:
    """A store and what is in it."""

    objects: LocalObjects | RemoteObjects
    files: StoredFiles
    batches: StoredBatches
    sweeper: Sweeper
    lock: DirectoryLock | None = None

    async def check(self) -> None:
        """Find out whether the store can be used: whether it lets us write, and creates only once.

        Raises:
            StorageError: if it cannot be reached, or refuses.
            StoreRefused: if it replaces an object that exists. Then two processes could end one batch.
        """
        path = f"check/{secrets.token_hex(16)}"
        try:
            created = [await self.objects.create(path, b"1"), await self.objects.create(path, b"2")]
        finally:
            await self.objects.delete([path])
        if created != [True, False]:
            raise StoreRefused(
                "the store does not refuse to create an object that exists (If-None-Match). "
                f"Correct {VARIABLE}, or use a newer version of the store"
            )

    def close(self) -> None:
        """End the threads, and let another process use the directory. Nobody may be writing any more."""
        if isinstance(self.objects, LocalObjects):
            self.objects.close()
        if self.lock is not None:
            self.lock.close()


def create_storage(settings: BatchSettings, *, wall: Callable[[], float] = time.time) -> Storage:
    """Return the store of the settings. It is not asked anything yet: see `Storage.check`.

    Raises:
        StoreRefused: if the settings name none, or another process uses the directory.
    """
    url = urlsplit(settings.batch_store)
    objects: LocalObjects | RemoteObjects
    lock: DirectoryLock | None = None
    if url.scheme == "file":
        objects, lock = _directory(url, settings)
    else:
        objects = _bucket(url, settings)
    records = Records(objects)
    retention_s = settings.batch_retention_days * DAY_S
    files = StoredFiles(objects, records, retention_s=retention_s, wall=wall)
    return Storage(
        objects=objects,
        files=files,
        batches=StoredBatches(objects, records),
        sweeper=Sweeper(objects, files, records, retention_s=retention_s),
        lock=lock,
    )


def _directory(
    url: SplitResult, settings: BatchSettings
) -> tuple[LocalObjects, DirectoryLock | None]:
    root = Path(unquote(url.path))
    if url.netloc or url.query or url.fragment or not root.is_absolute() or root == Path("/"):
        raise StoreRefused(f"{VARIABLE} must be like file:///var/lib/fleetkeeper/batch")
    try:
        # With the links resolved, as obstore does.
        make_folders(root)
        root = root.resolve(strict=True)
        lock = None if settings.batch_store_shared else DirectoryLock(root)
        return LocalObjects(root, settings.batch_store_timeout_seconds), lock
    except OSError as error:
        raise StoreRefused(
            f"the directory {root} of {VARIABLE} cannot be used: {reason_of(error)}"
        ) from error


def _bucket(url: SplitResult, settings: BatchSettings) -> RemoteObjects:
    prefix = url.path.strip("/")
    # Not quoted in messages: it may have a password in it.
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
            client_options=_client_options(timeout_s),
            retry_config=_retries(timeout_s),
        )
    except BadPart as error:
        raise StoreRefused(f"{VARIABLE}: {error}. Use letters, digits, dot, dash and _") from error
    except (BaseError, ValueError) as error:
        raise StoreRefused(f"the store of {VARIABLE} cannot be used: {reason_of(error)}") from error
    place = "/".join(part for part in (f"{url.scheme}://{url.netloc}", prefix) if part)
    return RemoteObjects(store, place, timeout_s)


def _client_options(timeout_s: float) -> ClientConfig:
    options: ClientConfig = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
    }
    if any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS):
        # Whoever writes http:// there means it.
        options["allow_http"] = True
    return options


def _retries(timeout_s: float) -> RetryConfig:
    """Return how calls are repeated: until half of their time is over, so that the last one can end."""
    return {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=timeout_s / 2),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=max(0.2, timeout_s / 10)),
            "base": 2,
        },
    }
