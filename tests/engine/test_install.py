"""`install DIR` brings the supervisor to an environment that has vLLM and nothing of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from supervised_engine import ENGINE_PYTHON, STOCK_PYTHON, RunningEngine, StartEngine
from tiny_adapter import make_tiny_adapter

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


@pytest.fixture(scope="module")
def injected(
    _starter: StartEngine, installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunningEngine:
    """Delivery `inject`: the installed copy supervises the stock vLLM; with a LoRA adapter."""
    adapter = make_tiny_adapter(tmp_path_factory.mktemp("adapters") / "pirate", rank=12)
    found = _starter(
        sections={"model": {"adapters": [{"name": "pirate", "path": str(adapter)}]}},
        python=STOCK_PYTHON,
        launcher=installed / "bin" / "fleetkeeper-engine",
    )
    found.wait_ready()
    return found


def test_an_injected_supervisor_runs_a_stock_vllm(injected: RunningEngine, installed: Path) -> None:
    """Ready, live limits on, and our package is the installed one."""
    assert injected.complete(8).status_code == 200
    assert injected.metrics()["fleetkeeper_live_limits_supported"] == 1
    assert injected.put_limits(8, 512, lease_s=5).status_code == 200
    path = injected.vllm_process("APIServer").environ()["PYTHONPATH"]
    assert path.startswith(str(installed / "own"))


def test_an_adapter_is_loaded_at_start_and_served_under_its_name(injected: RunningEngine) -> None:
    """Its greedy answer is its own; it passes tiers and counters like the model; a stranger is 404."""
    listed = injected.session.get(f"{injected.url}/v1/models", timeout=30).json()["data"]
    assert {model["id"] for model in listed} == {"tiny", "pirate"}
    before = injected.metrics()
    texts = {}
    for name in ("tiny", "pirate"):
        answers = [injected.complete(24, model=name, temperature=0) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        told = {answer.json()["choices"][0]["text"] for answer in answers}
        assert len(told) == 1, "greedy: the same each time"
        texts[name] = told.pop()
    assert texts["tiny"] != texts["pirate"]
    assert injected.complete(4, model="parrot").status_code == 404
    after = injected.metrics()
    arrivals = 'fleetkeeper_arrivals_total{tier="standard"}'
    assert after[arrivals] - before[arrivals] == 5
    tokens = "fleetkeeper_generation_tokens_total"
    assert after[tokens] - before[tokens] == 4 * 24


def test_an_injected_supervisor_ends_cleanly(injected: RunningEngine) -> None:
    """Last: SIGTERM drains and ends with 0."""
    assert injected.stop() == 0
