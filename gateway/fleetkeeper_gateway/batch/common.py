"""The store and the queue of a process: the batch process or one of its worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fleetkeeper_gateway.batch.queue import RedisQueue, create_queue
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.batch.storage import Storage, StoreRefused, create_storage
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.keys import KeysSettings
from fleetkeeper_gateway.limits import LimitSettings
from fleetkeeper_gateway.server import CannotStart
from fleetkeeper_gateway.services import ServicesSettings


@dataclass(frozen=True, slots=True)
class AllSettings:
    """Settings of all parts."""

    batch: BatchSettings = field(default_factory=BatchSettings)
    keys: KeysSettings = field(default_factory=KeysSettings)
    grants: GrantSettings = field(default_factory=GrantSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    services: ServicesSettings = field(default_factory=ServicesSettings)


@contextlib.asynccontextmanager
async def create_common(
    settings: AllSettings, name: str, *, is_child: bool = False
) -> AsyncIterator[tuple[Storage, RedisQueue]]:
    """Create the store and the queue, and close them at the end.

    Args:
        settings: settings of all parts.
        name: name of the process in the queue.
        is_child: True for a worker process. Its parent holds the lock of a directory.

    Raises:
        CannotStart: if the settings are not valid.
    """
    batch = settings.batch
    if is_child:
        batch = batch.model_copy(update={"batch_store_shared": True})
    try:
        storage = create_storage(batch)
    except StoreRefused as error:
        raise CannotStart(str(error)) from error
    with contextlib.closing(storage):
        try:
            queue = create_queue(batch, settings.limits, name)
        except ValueError as error:
            raise CannotStart(str(error)) from error
        yield storage, queue
