"""Every way into an image brings the engine together with the contract that it imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleetkeeper_engine.tools.install import install
from fleetkeeper_local.images import engine_layers, oci

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"fleetkeeper_contract", "fleetkeeper_engine", "fleetkeeper_steps"}


@pytest.mark.slow
def test_an_installed_engine_runs_on_what_was_installed(tmp_path: Path) -> None:
    """Without site-packages (-S), as in a stock image that has nothing of ours."""
    install(tmp_path)
    launcher = tmp_path / "bin" / "fleetkeeper-engine"
    imported = "import fleetkeeper_engine.supervisor.supervisor as s, fleetkeeper_contract as c\n"
    probe = tmp_path / "bin" / "probe"
    probe.write_text(
        launcher.read_text().replace("main()\n", f"{imported}print(s.__file__, c.__file__)\n")
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", probe], capture_output=True, text=True, check=True
    )
    for file in done.stdout.split():
        assert Path(file).is_relative_to(tmp_path / "own")


def test_own_packages_alone_are_first_on_the_path(tmp_path: Path) -> None:
    install(tmp_path)
    found = {path.name for path in (tmp_path / "own").iterdir()}
    assert {name for name in found if not name.endswith(".dist-info")} == PACKAGES
    assert not list((tmp_path / "dependencies").glob("*fleetkeeper*"))


def test_the_layer_of_the_local_image_has_both_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    def write_layer(root: Path, *_: object) -> oci.Layer:
        seen.update(path.name for path in (root / engine_layers.SITE).iterdir())
        (tmp_path / "layer").touch()
        return oci.Layer(tmp_path / "layer", "sha256:0", "sha256:0")

    monkeypatch.setattr(oci, "write_layer", write_layer)
    monkeypatch.setattr(engine_layers, "_compile", lambda *_: None)
    engine_layers._own_packages(tmp_path, ROOT)
    assert seen == PACKAGES


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cpu", "Containerfile.inject"])
def test_a_containerfile_builds_both_packages(name: str) -> None:
    text = (ROOT / "engine_image" / name).read_text()
    assert re.search(r"^COPY contract contract$", text, re.MULTILINE)
    assert " ./contract ./engine_image" in text
