"""`install DIR` brings the supervisor to an environment that has vLLM and nothing of ours.

The injected engine gets its model from a hub, has an adapter, and ends in a hang.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.engine_environment import PYTHON, STOCK_PYTHON
from tests.support.model_hub import COMMIT, TOKEN, ModelHub, model_hub
from tests.support.supervised_engine import (
    RunningEngine,
    StartEngine,
    eight_running,
    stopped,
)
from tests.support.tiny_adapter import make_tiny_adapter

pytestmark = pytest.mark.timeout(1200)
STALL_S = 15


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("injected") / "fleetkeeper"
    subprocess.run([PYTHON, "-m", "fleetkeeper_engine.cli", "install", directory], check=True)
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
    subprocess.run([PYTHON, "-m", "fleetkeeper_engine.cli", "install", installed], check=True)
    assert sorted(str(path) for path in installed.rglob("*.py")) == before


@pytest.fixture(scope="module")
def hub(tiny_model: Path) -> Iterator[ModelHub]:
    """A hub with the tiny model, open as fleet/tiny and with a token as fleet/gated."""
    with model_hub(tiny_model, name="fleet/tiny", gated="fleet/gated") as found:
        yield found


@pytest.fixture(scope="module")
def injected(
    _starter: StartEngine,
    installed: Path,
    hub: ModelHub,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunningEngine:
    """Delivery `inject`: the installed copy supervises the stock vLLM; a hub's model, a LoRA adapter."""
    adapter = make_tiny_adapter(tmp_path_factory.mktemp("adapters") / "pirate", rank=12)
    home = tmp_path_factory.mktemp("hub-cache")
    found = _starter(
        sections={
            "model": {
                "source": "fleet/gated",
                "revision": COMMIT,
                "adapters": [{"name": "pirate", "path": str(adapter)}],
            },
            "health": {"stallSeconds": STALL_S},
        },
        python=STOCK_PYTHON,
        launcher=installed / "bin" / "fleetkeeper-engine",
        environment={"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN},
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


def test_a_model_of_the_hub_is_fetched_before_the_start_and_not_asked_for_again(
    injected: RunningEngine, hub: ModelHub
) -> None:
    """vLLM gets the directory of exactly the revision asked for, and is offline: it fetched nothing."""
    words = injected.vllm_process("APIServer").cmdline()
    source = next(word.partition("=")[2] for word in words if word.startswith("--model="))
    assert Path(source).name == COMMIT
    weights = f"GET /fleet/gated/resolve/{COMMIT}/model.safetensors"
    assert sum(asked.startswith(weights) for asked in hub.asked) == 1
    assert injected.vllm_process("APIServer").environ()["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("model", "token", "told"),
    [
        ({"source": "fleet/absent"}, "", (66, "ModelNotFound")),
        ({"source": "fleet/tiny", "revision": "f" * 40}, "", (66, "ModelNotFound")),
        ({"source": "fleet/gated"}, "", (77, "ModelNotReadable")),
        ({"source": "fleet/tiny"}, "hf_wrong", (77, "ModelNotReadable")),
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
        assert (engine.wait_end(60), engine.termination()["class"]) == told


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


@pytest.mark.exhaustive
def test_a_core_that_hangs_under_load_is_ended_as_hung(injected: RunningEngine) -> None:
    """Last: not ready within 15 s, not live by stallSeconds, exit code 75 and a termination line."""
    with ThreadPoolExecutor(8) as pool:
        eight_running(injected, pool, 1500)
        with stopped(injected, "EngineCore") as since:
            not_ready = injected.wait_for(
                lambda: injected.health("ready") == 503, "not ready", STALL_S
            )
            assert injected.wait_end(STALL_S + 60) == 75
            took = time.monotonic() - since
    print(f"not ready after {not_ready:.1f} s, ended {took:.1f} s after the hang began")
    assert STALL_S - 2 <= took <= STALL_S + 5
    line = injected.termination()
    assert (line["class"], line["phase"]) == ("Hung", "serve")
    assert line["detail"]
