"""`install DIR` brings the supervisor to an environment that has vLLM and nothing of ours.

The shared engine is such an injected one. It gets its model from a hub and has an adapter.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.engine.engine_environment import PYTHON, STOCK_PYTHON
from tests.support.engine.supervised_engine import (
    RunningEngine,
    StartEngine,
)
from tests.support.services.model_hub import COMMIT, ModelHub

pytestmark = pytest.mark.timeout(1200)
STALL_S = 15


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


@pytest.mark.exhaustive
def test_installed_twice_is_as_installed_once(installed: Path) -> None:
    """An init container may run again."""
    before = sorted(str(path) for path in installed.rglob("*.py"))
    subprocess.run([PYTHON, "-m", "fleetkeeper_engine.cli", "install", installed], check=True)
    assert sorted(str(path) for path in installed.rglob("*.py")) == before


def test_an_injected_supervisor_runs_a_stock_vllm(engine: RunningEngine, installed: Path) -> None:
    """Ready, live limits on, and our package is the installed one."""
    assert engine.complete(8).status_code == 200
    assert engine.metrics()["fleetkeeper_live_limits_supported"] == 1
    assert engine.put_limits(8, 512, lease_s=5).status_code == 200
    path = engine.vllm_process("APIServer").environ()["PYTHONPATH"]
    assert path.startswith(str(installed / "own"))


def test_a_model_of_the_hub_is_fetched_before_the_start_and_not_asked_for_again(
    engine: RunningEngine, hub: ModelHub
) -> None:
    """vLLM gets the directory of exactly the revision asked for, and is offline: it fetched nothing."""
    words = engine.vllm_process("APIServer").cmdline()
    source = next(word.partition("=")[2] for word in words if word.startswith("--model="))
    assert Path(source).name == COMMIT
    weights = f"GET /fleet/gated/resolve/{COMMIT}/model.safetensors"
    assert sum(asked.startswith(weights) for asked in hub.asked) == 1
    assert engine.vllm_process("APIServer").environ()["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("model", "token", "told"),
    [
        pytest.param(
            {"source": "fleet/absent"}, "", (66, "ModelNotFound"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"source": "fleet/tiny", "revision": "f" * 40},
            "",
            (66, "ModelNotFound"),
            marks=pytest.mark.exhaustive,
        ),
        ({"source": "fleet/gated"}, "", (77, "ModelNotReadable")),
        pytest.param(
            {"source": "fleet/tiny"},
            "hf_wrong",
            (77, "ModelNotReadable"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_the_hub_refuses_is_told_by_its_class(
    start: StartEngine, hub: ModelHub, model: dict[str, str], token: str, told: tuple[int, str]
) -> None:
    """No such model, no such revision, no token for a gated one, a token that is none."""
    with tempfile.TemporaryDirectory() as home:
        engine = start(
            sections={"model": model},
            environment={"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_TOKEN": token},
        )
        assert (engine.wait_end(), engine.termination()["class"]) == told


def test_an_adapter_is_loaded_at_start_and_served_under_its_name(engine: RunningEngine) -> None:
    """Its greedy answer is its own; it passes tiers and counters like the model; a stranger is 404."""
    listed = engine.session.get(f"{engine.url}/v1/models", timeout=300).json()["data"]
    assert {model["id"] for model in listed} == {"tiny", "pirate"}
    before = engine.metrics()
    texts = {}
    for name in ("tiny", "pirate"):
        answers = [engine.complete(24, model=name, temperature=0) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        told = {answer.json()["choices"][0]["text"] for answer in answers}
        assert len(told) == 1, "greedy: the same each time"
        texts[name] = told.pop()
    assert texts["tiny"] != texts["pirate"]
    assert engine.complete(4, model="parrot").status_code == 404
    after = engine.metrics()
    arrivals = 'fleetkeeper_arrivals_total{tier="standard"}'
    assert after[arrivals] - before[arrivals] == 5
    tokens = "fleetkeeper_generation_tokens_total"
    assert after[tokens] - before[tokens] == 4 * 24
