"""Answers that an image brings are laid where vLLM keeps its own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fleetkeeper_engine.supervisor.launch.model_info_cache import (
    bundled_answers,
    cache_directory,
    install_answers,
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/home/engine"}, "/home/engine/.cache/vllm"),
        ({"HOME": "/home/engine", "XDG_CACHE_HOME": "/cache"}, "/cache/vllm"),
        ({"HOME": "/home/engine", "VLLM_CACHE_ROOT": "/models/.vllm"}, "/models/.vllm"),
    ],
)
def test_the_cache_is_where_vllm_looks(environment: dict[str, str], expected: str) -> None:
    assert cache_directory(environment) == Path(expected)


def test_what_is_missing_is_copied_and_what_vllm_wrote_is_left(tmp_path: Path) -> None:
    source, cache = (
        bundled_answers(tmp_path / "venv"),
        tmp_path / "home" / ".cache" / "vllm" / "modelinfos",
    )
    source.mkdir(parents=True)
    for name in ("a.json", "b.json"):
        (source / name).write_text("brought")
    cache.mkdir(parents=True)
    (cache / "a.json").write_text("vLLM's own")
    environment = {"HOME": str(tmp_path / "home")}
    assert install_answers(environment, source) == 1
    assert install_answers(environment, source) == 0, "a second start finds everything there"
    found = {file.name: file.read_text() for file in cache.iterdir()}
    assert found == {"a.json": "vLLM's own", "b.json": "brought"}


def test_an_image_that_brings_nothing_changes_nothing(tmp_path: Path) -> None:
    assert install_answers({"HOME": str(tmp_path)}, bundled_answers(tmp_path)) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = bundled_answers(tmp_path / "venv")
    source.mkdir(parents=True)
    (source / "a.json").write_text("brought")
    (tmp_path / "home").write_text("no folder")
    with caplog.at_level(logging.INFO, logger="fleetkeeper.model_info_cache"):
        assert install_answers({"HOME": str(tmp_path / "home")}, source) == 0
    assert str(tmp_path / "home") in caplog.text
