"""What an image is made of: a digest tells whether a build would make another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.images import builder
from fleetkeeper_local.images.builder import context_digest

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / ".dockerignore").write_text("# ours\n*\n!LICENSE\n!code\n**/__pycache__\n")
    (tmp_path / "LICENSE").write_text("as you like")
    (tmp_path / "code/part").mkdir(parents=True)
    (tmp_path / "code/part/one.py").write_text("1")
    return tmp_path


def _changed(context: Path) -> None:
    (context / "code/part/one.py").write_text("2")


def _added(context: Path) -> None:
    (context / "code/two.py").write_text("")


def _removed(context: Path) -> None:
    (context / "LICENSE").unlink()


def _renamed(context: Path) -> None:
    (context / "code/part/one.py").rename(context / "code/one.py")


def _runnable(context: Path) -> None:
    (context / "code/part/one.py").chmod(0o755)


@pytest.mark.parametrize("change", [_changed, _added, _removed, _renamed, _runnable])
def test_every_change_of_what_a_build_sees_is_another_digest(
    context: Path, change: Callable[[Path], None]
) -> None:
    """Content, names and rights go into an image."""
    before = context_digest(context)
    change(context)
    assert context_digest(context) != before


def test_what_a_build_does_not_see_changes_nothing(context: Path) -> None:
    """Byte code, and what .dockerignore keeps out."""
    before = context_digest(context)
    (context / "code/__pycache__").mkdir()
    (context / "code/__pycache__/one.pyc").write_bytes(b"1")
    (context / "out").mkdir()
    (context / "out/demo.txt").write_text("a page")
    assert context_digest(context) == before


def test_the_base_and_the_arguments_count(context: Path) -> None:
    """The same files on another base are another image."""
    assert context_digest(context, "base:1") != context_digest(context, "base:2")


@pytest.mark.parametrize("name", builder.RECIPES)
def test_all_that_a_containerfile_copies_is_in_its_context(name: str) -> None:
    """Else a build would fail, and its digest would not tell of a change."""
    recipe = builder.RECIPES[name]
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_in = [REPOSITORY / line[1:] for line in lines if line.startswith("!")]
    text = (REPOSITORY / recipe.containerfile).read_text()
    copies = [
        line.split()[1:-1]
        for line in text.splitlines()
        if line.startswith("COPY ") and "--from=" not in line
    ]
    sources = [REPOSITORY / recipe.context / source for words in copies for source in words]
    assert sources
    for source in sources:
        assert any(source.is_relative_to(folder) for folder in let_in), source


@dataclass
class Buildah:
    """Stands in for the program: makes an image of a number, and knows those that it has."""

    built: int = 0
    has: set[str] = field(default_factory=set)

    def __call__(self, *argv: object, **_: object) -> CompletedProcess[str]:
        words = [str(word) for word in argv]
        if "inspect" in words:
            return CompletedProcess(words, 0 if words[-1] in self.has else 125, "", "")
        assert "build" in words
        self.built += 1
        image_id = f"{self.built:x}".ljust(64, "0")
        self.has.add(image_id)
        (target,) = (word.split("=", 1)[1] for word in words if word.startswith("--iidfile="))
        Path(target).write_text(f"sha256:{image_id}")
        return CompletedProcess(words, 0, "", "")


def test_an_image_is_built_again_when_its_parts_changed_or_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, context: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Else buildah is not asked to build, and the image is the same."""
    buildah, store = Buildah(), tmp_path_factory.mktemp("store")
    monkeypatch.setattr(builder, "attempt", buildah)
    monkeypatch.setattr(builder, "store", lambda: store)
    monkeypatch.setattr(builder, "_check_disk", lambda: None)
    monkeypatch.setattr("fleetkeeper_local.common.packages.ensure_packages", lambda _: None)
    monkeypatch.setenv(builder.BASE_VARIABLE, "base:1")
    recipe = builder.Recipe("one", "Containerfile", root=context)
    (context / "Containerfile").write_text("FROM base")

    first = builder.build_image(recipe)
    assert builder.build_image(recipe) == first
    assert buildah.built == 1
    _changed(context)
    second = builder.build_image(recipe)
    assert second.tag != first.tag
    (context / "Containerfile").write_text("FROM other")
    builder.build_image(recipe)
    monkeypatch.setenv(builder.BASE_VARIABLE, "base:2")
    builder.build_image(recipe)
    assert buildah.built == 4
    buildah.has.clear()
    builder.build_image(recipe)
    assert buildah.built == 5
    builder._record(recipe).write_text("half")
    builder.build_image(recipe)
    assert buildah.built == 6
