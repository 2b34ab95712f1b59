from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetkeeper_gateway.batch.storage import Storage
from tests.gateway.batch.workers.world import MemoryQueue, ScriptedSender, storage_in


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """A store in a directory."""
    found = storage_in(tmp_path)
    yield found
    found.close()


@pytest.fixture
async def queue() -> MemoryQueue:
    """A queue."""
    return MemoryQueue()


@pytest.fixture
def sender() -> ScriptedSender:
    """What answers lines."""
    return ScriptedSender()
