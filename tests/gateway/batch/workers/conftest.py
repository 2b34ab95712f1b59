from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fleetkeeper_gateway.batch.workers import holding, taker
from tests.gateway.batch.workers.memory import ScriptedSender
from tests.gateway.batch.workers.world import storage_in

if TYPE_CHECKING:
    from fleetkeeper_gateway.batch.storage import Storage


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    """A store in a directory."""
    found = storage_in(tmp_path)
    yield found
    found.close()


@pytest.fixture
def sender() -> ScriptedSender:
    """What answers lines."""
    return ScriptedSender()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker soon see what waits."""
    monkeypatch.setattr(taker, "_WAIT_S", 0.02)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker try again soon."""
    monkeypatch.setattr(holding, "FIRST_PAUSE_S", 0.005)
