"""`install DIR` brings the supervisor to an environment that has vLLM and nothing of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from supervised_engine import ENGINE_PYTHON, STOCK_PYTHON, StartEngine

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("injected") / "fleetkeeper"
    subprocess.run(
        [ENGINE_PYTHON, "-m", "fleetkeeper_engine.cli", "install", directory], check=True
    )
    return directory


def test_the_stock_environment_has_nothing_of_ours() -> None:
    done = subprocess.run(
        [STOCK_PYTHON, "-c", "import fleetkeeper_engine"], capture_output=True, check=False
    )
    assert b"No module named 'fleetkeeper_engine'" in done.stderr


def test_what_the_engine_image_brings_wins_over_what_is_injected(installed: Path) -> None:
    """Our package comes first on the path, its dependencies last."""
    launcher = (installed / "bin" / "fleetkeeper-engine").read_text()
    probe = launcher.replace(
        "main()\n",
        "import pydantic, fleetkeeper_engine as f\nprint(pydantic.__file__, f.__file__)\n",
    )
    script = installed / "bin" / "probe"
    script.write_text(probe)
    done = subprocess.run([STOCK_PYTHON, script], capture_output=True, check=True, text=True)
    pydantic, ours = done.stdout.split()
    assert Path(pydantic).resolve().is_relative_to(STOCK_PYTHON.parents[1].resolve())
    assert Path(ours).is_relative_to(installed / "own")
    assert (installed / "dependencies" / "pydantic").is_dir()
    assert (installed / "dependencies" / "jwt").is_dir()
    assert not (installed / "dependencies" / "torch").exists()
    assert not (installed / "dependencies" / "vllm").exists()


def test_installed_twice_is_as_installed_once(installed: Path) -> None:
    """An init container may run again."""
    before = sorted(str(path) for path in installed.rglob("*.py"))
    subprocess.run(
        [ENGINE_PYTHON, "-m", "fleetkeeper_engine.cli", "install", installed], check=True
    )
    assert sorted(str(path) for path in installed.rglob("*.py")) == before


def test_an_injected_supervisor_runs_a_stock_vllm(start: StartEngine, installed: Path) -> None:
    """Delivery `inject`: ready, live limits on, our plugin found by its entry point, a clean end."""
    engine = start(python=STOCK_PYTHON, launcher=installed / "bin" / "fleetkeeper-engine")
    engine.wait_ready()
    assert engine.complete(8).status_code == 200
    metrics = engine.metrics()
    assert metrics["fleetkeeper_live_limits_supported"] == 1
    assert engine.put_limits(8, 512, lease_s=5).status_code == 200
    assert (
        engine.vllm_process("APIServer").environ()["PYTHONPATH"].startswith(str(installed / "own"))
    )
    assert engine.stop() == 0
