"""Shared memory for tests of one process of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetkeeper_engine.in_vllm.vllm_settings import ENVIRONMENT, VllmSettings
from fleetkeeper_engine.shm.region import ENVIRONMENT as REGION_ENVIRONMENT
from fleetkeeper_engine.shm.region import Region


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Region:
    path = tmp_path / "region"
    monkeypatch.setenv(REGION_ENVIRONMENT, str(path))
    settings = VllmSettings(min_sequences=4, min_tokens=256, max_sequences=64, max_tokens=2048)
    monkeypatch.setenv(ENVIRONMENT, settings.to_json())
    return Region.create(path)
