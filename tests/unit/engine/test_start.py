"""What is found out before a start: versions, formats, threads, the last start, and how children run."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.spec import DType
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.features import find_features, numbers_of
from fleetkeeper_engine.supervisor.launch.model_files import ModelFacts
from fleetkeeper_engine.supervisor.launch.prepare import _decided_dtype, desired_threads
from fleetkeeper_engine.supervisor.launch.start_measurements import read_measured, write_measured
from fleetkeeper_engine.supervisor.process import Reaper
from fleetkeeper_engine.tools.install import requirements_of
from tests.support.engine.engine_documents import a_document


def test_a_measurement_is_kept_for_the_same_engine_only(tmp_path: Path) -> None:
    assert read_measured(tmp_path, "key") is None
    write_measured(tmp_path, "key", 123)
    assert read_measured(tmp_path, "key") == 123
    assert read_measured(tmp_path, "another") is None
    (tmp_path / "measured.json").write_text('{"key": "key", "bytes": "many"}')
    assert read_measured(tmp_path, "key") is None


def test_an_image_that_is_too_old_says_which_part() -> None:
    def version_of(name: str) -> str:
        known = {
            "vllm": "0.31.9",
            "pydantic": "2.9.0",
            "aiohttp": "3.10.11",
            "prometheus-client": "0.21",
            "pyjwt": "2.10",
        }
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    with pytest.raises(StartRefusedError, match="no vLLM") as refused:
        find_features(version_of)
    assert refused.value.death == "BadEngineOption"
    assert numbers_of("0.32.0rc1+cpu") == (0, 32, 0)
    assert numbers_of("unknown") == ()


def test_requirements_are_followed_with_the_extras_that_were_named() -> None:
    table = {
        "ours": ["jwt[crypto]>=2", "web (>=3)", 'cuda-lib; extra == "cuda"'],
        "jwt": ['cryptography>=3; extra == "crypto"', 'sphinx; extra == "docs"'],
        "web": ["Multi_Dict"],
        "multi-dict": None,
        "cryptography": ["cffi; platform_python_implementation != 'PyPy'"],
        "cffi": [],
    }

    def requires(name: str) -> list[str] | None:
        if name not in table:
            raise importlib.metadata.PackageNotFoundError(name)
        return table[name]

    assert requirements_of("ours", requires) == {
        "ours",
        "jwt",
        "web",
        "multi-dict",
        "cryptography",
        "cffi",
    }


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    found = Reaper(output=os.open(os.devnull, os.O_WRONLY))
    found.start()
    yield found
    found.stop()


async def test_a_childs_output_and_status_are_kept(reaper: Reaper) -> None:
    script = "import sys; print('one'); print('two', file=sys.stderr); sys.stdout.write('rest'); sys.exit(3)"
    child = await reaper.spawn([sys.executable, "-u", "-c", script], {})
    assert await child.ended == 3
    assert child.tee is not None
    await child.tee
    assert list(child.lines) == ["one", "two", "rest"]
    assert not child.alive


async def test_a_whole_session_is_ended(reaper: Reaper) -> None:
    """vLLM's workers outlive their parent when only it is killed."""
    script = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    child = await reaper.spawn([sys.executable, "-c", script], dict(os.environ))
    for _ in range(500):
        if child.lines:
            break
        await asyncio.sleep(0.02)
    assert os.getsid(child.pid) == child.pid
    child.kill_session()
    assert await child.ended == -signal.SIGKILL
    assert child.tee is not None
    await asyncio.wait_for(child.tee, 60)  # the pipe closes only when the grandchild is gone too


async def test_a_child_that_ends_at_once_is_not_missed(reaper: Reaper) -> None:
    for _ in range(20):
        child = await reaper.spawn(["/bin/true"], {})
        assert await asyncio.wait_for(child.ended, 60) == 0


async def test_a_program_that_is_not_there_is_an_error(reaper: Reaper) -> None:
    with pytest.raises(FileNotFoundError):
        await reaper.spawn(["/no/such/program"], {})


@pytest.mark.parametrize(
    ("quota", "cpus", "threads"),
    [
        (None, 2, 1),
        (None, 16, 15),
        (1.0, 16, 1),
        (1.5, 16, 1),
        (4.0, 16, 3),
        (64.0, 8, 7),
        (0.2, 1, 1),
    ],
)
def test_one_cpu_of_the_pod_is_left_to_the_api_server(
    quota: float | None, cpus: int, threads: int
) -> None:
    """No more threads than the quota feeds, and never none."""
    assert desired_threads(quota, cpus) == threads


STAND_IN_TORCH = """
import os, signal
bfloat16 = float16 = float32 = None
class Ones:
    def __matmul__(self, other):
        {act}
        return self
    def __getitem__(self, place):
        return {value}
def ones(*shape, dtype):
    return Ones()
"""


def a_cpu(directory: Path, act: str = "pass", value: float = 256.0) -> dict[str, str]:
    """The environment of a machine whose torch does that at its first matrix product."""
    (directory / "torch.py").write_text(STAND_IN_TORCH.format(act=act, value=value))
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(directory)}


def facts_of(dtype: DType) -> ModelFacts:
    return cast("ModelFacts", SimpleNamespace(dtype=dtype))


SIGILL = "os.kill(os.getpid(), signal.SIGILL)"


@pytest.mark.parametrize(
    ("act", "value", "dtype"),
    [("pass", 256.0, DType.BFLOAT16), (SIGILL, 256.0, DType.FLOAT32), ("pass", 0.0, DType.FLOAT32)],
)
async def test_auto_is_float32_where_16_bits_kill_or_lie(
    reaper: Reaper, tmp_path: Path, act: str, value: float, dtype: DType
) -> None:
    """A CPU that advertises what it cannot run ends the throw-away process, not the engine."""
    document = a_document(engine={"dtype": "auto"})
    machine = a_cpu(tmp_path, act, value)
    found = await _decided_dtype(document, facts_of(DType.BFLOAT16), machine, reaper.spawn)
    assert found is dtype


async def test_an_explicit_format_that_kills_is_refused_before_the_start(
    reaper: Reaper, tmp_path: Path
) -> None:
    document = a_document(engine={"dtype": "bfloat16"})
    with pytest.raises(StartRefusedError, match=r"SIGILL.*set engine\.dtype to float32") as refused:
        await _decided_dtype(
            document, facts_of(DType.FLOAT32), a_cpu(tmp_path, SIGILL), reaper.spawn
        )
    assert refused.value.death is DeathClass.BAD_ENGINE_OPTION


async def test_float32_and_cuda_are_not_tried(reaper: Reaper, tmp_path: Path) -> None:
    """There is nothing to find out: the throw-away process would die here."""
    machine = a_cpu(tmp_path, SIGILL)
    plain = a_document(engine={"dtype": "auto"})
    assert (
        await _decided_dtype(plain, facts_of(DType.FLOAT32), machine, reaper.spawn) is DType.FLOAT32
    )
    cuda = a_document(accelerator="cuda", engine={"dtype": "bfloat16"})
    assert (
        await _decided_dtype(cuda, facts_of(DType.BFLOAT16), machine, reaper.spawn)
        is DType.BFLOAT16
    )
