"""The page of the evaluation: which alternative it names, medians and spread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def modules(part: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    """The modules of the evaluation."""
    return {name: part(name) for name in ("scenes", "play", "pages", "curve")}


def test_the_cheapest_alternative_that_reaches_95_percent_is_named(
    modules: dict[str, ModuleType],
) -> None:
    """Not a cheaper one below it, and with the median and the spread of both."""
    play, pages, scenes = modules["play"], modules["pages"], modules["scenes"]

    def figures(attainment: float, gpu_hours: float) -> object:
        return play.Figures(attainment, gpu_hours, 0.9, 0.99, 2, 1, 0, 3)

    results = {
        play.key_of(play.Job("chat", seed)): figures(0.97, hours)
        for seed, hours in ((1, 20.0), (2, 24.0), (3, 30.0))
    }
    good, cheap = play.Case("hpa-concurrency", 40, 512), play.Case("hpa-concurrency", 80, 512)
    results[play.key_of(play.Job("chat", 1, good))] = figures(0.96, 30.0)
    results[play.key_of(play.Job("chat", 1, cheap))] = figures(0.90, 12.0)
    chat = [scene for scene in scenes.scenes(None) if scene.name == "chat"]
    text = pages.page(chat, {"chat": True}, [1, 2, 3], results)
    row = next(line for line in text.splitlines() if line.startswith("| chat |"))
    assert "24.0 (20.0 to 30.0)" in row
    assert "hpa-concurrency:40@512" in row
    assert "| 0.80 |" in row


def test_each_rule_of_the_ablation_exists_and_changes_a_run(
    modules: dict[str, ModuleType],
) -> None:
    """Every (module, name) that is replaced is there; otherwise a rename would switch nothing off."""
    for rule, parts in modules["play"].RULES.items():
        assert parts, rule
        for module, name, _ in parts:
            assert hasattr(module, name), (rule, name)


def test_the_figure_is_drawn_from_the_runs_that_are_there(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    """A scene without runs has an empty panel."""
    play, file = modules["play"], tmp_path / "evaluation.png"
    results = {play.key_of(play.Job("chat", 1)): play.Figures(0.5, 20.0, 0.9, 0.99, 2, 1, 0, 3)}
    modules["curve"].draw(["chat", "ramp"], [1, 2], results, file)
    assert file.read_bytes().startswith(b"\x89PNG")
