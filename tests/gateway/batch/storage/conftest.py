"""A store of each kind for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from fleetkeeper_gateway.batch.storage import Storage, create_storage
from tests.support.batch.batch_storage import Clock, settings
from tests.support.services.bucket_server import BUCKET, PREFIX, BucketServer

STORES = ("directory", "s3", "google")


@pytest.fixture
async def bucket(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BucketServer]:
    """A running bucket that the variables of this process lead to."""
    async with BucketServer(page_keys=7).running() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def clock() -> Clock:
    """The time at which files of a store expire."""
    return Clock()


@pytest.fixture(params=STORES)
async def storage(
    request: pytest.FixtureRequest, tmp_path: Path, bucket: BucketServer, clock: Clock
) -> AsyncIterator[Storage]:
    """A store of each kind."""
    url = {
        "directory": f"file://{tmp_path}/store",
        "s3": f"s3://{BUCKET}/{PREFIX}",
        "google": f"gs://{BUCKET}/{PREFIX}",
    }[request.param]
    store = create_storage(settings(url), wall=clock)
    yield store
    store.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a local store."""
    return tmp_path / "store"


@pytest.fixture
def local(directory: Path, clock: Clock) -> Iterator[Storage]:
    """A store in a directory."""
    store = create_storage(settings(f"file://{directory}"), wall=clock)
    yield store
    store.close()


@pytest.fixture(params=["s3", "gs"])
def remote(
    request: pytest.FixtureRequest, bucket: BucketServer, clock: Clock
) -> Callable[[float], Storage]:
    """Make stores in a bucket, with a time limit in seconds."""
    return lambda timeout_s: create_storage(
        settings(f"{request.param}://{BUCKET}/{PREFIX}", batch_store_timeout_seconds=timeout_s),
        wall=clock,
    )
