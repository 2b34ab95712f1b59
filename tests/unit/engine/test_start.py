"""From the document to the words that start vLLM, and what is read of the machine for it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.in_vllm.settings import ENVIRONMENT as SETTINGS
from fleetkeeper_engine.in_vllm.settings import MIDDLEWARE, SCHEDULER_FACTORY
from fleetkeeper_engine.spec import DType, EngineDocument, parse_document
from fleetkeeper_engine.supervisor.launch.argv import Launch, desired_argv, desired_environment
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.features import find_features, numbers_of
from fleetkeeper_engine.supervisor.launch.memory_plan import MemoryPlan
from fleetkeeper_engine.supervisor.launch.model_files import ModelFacts
from fleetkeeper_engine.supervisor.launch.prepare import _decided_dtype, desired_threads
from fleetkeeper_engine.supervisor.launch.start_measurements import read_measured, write_measured
from fleetkeeper_engine.supervisor.memory.cgroup import Cgroup, read_cpu_quota
from fleetkeeper_engine.supervisor.memory.nvml import DeviceReader
from fleetkeeper_engine.supervisor.memory.watch import device_reader, process_reader
from fleetkeeper_engine.supervisor.process import Reaper
from fleetkeeper_engine.tools.install import requirements_of

GIB = 1024**3


def a_document(**sections: Any) -> EngineDocument:
    return parse_document(
        json.dumps(
            {
                "contract": 1,
                "accelerator": "cpu",
                "model": {"source": "/models/m", "servedName": "chat"},
                **sections,
            }
        )
    )


LAUNCH = Launch(
    python="/usr/bin/python3",
    entry="vllm.entrypoints.openai.api_server",
    model="/models/m",
    adapters={},
    dtype=DType.FLOAT32,
    lora_rank=8,
    max_length=32_768,
    region="/dev/shm/fleetkeeper/shared-memory",
    package_path="/opt/own",
    internal_token="secret-mark",
    threads=4,
)
PLAN = MemoryPlan(cap_bytes=GIB, kv_cache_bytes=GIB)


def test_every_option_is_one_token_and_the_plan_is_in_it() -> None:
    words = desired_argv(a_document(engine={"tensorParallelSize": 2}), PLAN, LAUNCH)
    assert words[:3] == ["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert all(word.startswith("--") for word in words[3:])
    for expected in (
        "--model=/models/m",
        "--scheduling-policy=priority",
        f"--scheduler-cls={SCHEDULER_FACTORY}",
        f"--middleware={MIDDLEWARE}",
        "--api-server-count=1",
        "--shutdown-timeout=0",
        f"--kv-cache-memory-bytes={GIB // 2}",
        "--enable-prefix-caching",
        "--long-prefill-token-threshold=7936",
    ):
        assert expected in words
    assert not any(word.startswith("--gpu-memory-utilization") for word in words)
    names = [word.partition("=")[0] for word in words[3:]]
    assert len(set(names)) == len(names)


def test_one_prompts_part_of_a_step_is_never_above_the_longest_sequence() -> None:
    """vLLM would refuse to start: a model of 512 tokens with batches of 8192 is a plain wish."""
    short = replace(LAUNCH, max_length=512)
    assert "--long-prefill-token-threshold=512" in desired_argv(a_document(), PLAN, short)


def test_truths_become_flags_and_adapters_come_as_words_of_one_option() -> None:
    document = a_document(
        engine={
            "options": {"enforce-eager": "true", "async-scheduling": "false", "seed": "7"},
            "prefixCaching": False,
        }
    )
    adapters = {"sql": "/adapters/sql", "law": "/adapters/law"}
    launch = Launch(**{**_fields(LAUNCH), "adapters": adapters, "lora_rank": 16, "eager": True})
    words = desired_argv(document, PLAN, launch)
    assert "--no-enable-prefix-caching" in words
    assert words[-3:] == ["--no-async-scheduling", "--enforce-eager", "--seed=7"]
    assert words.count("--enforce-eager") == 1
    place = words.index("--lora-modules")
    assert words[place + 1 : place + 3] == ["sql=/adapters/sql", "law=/adapters/law"]
    assert {"--enable-lora", "--max-loras=2", "--max-lora-rank=16"} <= set(words)


def test_a_cuda_plan_is_a_share_of_the_device() -> None:
    plan = MemoryPlan(cap_bytes=GIB, gpu_memory_utilization=0.78)
    words = desired_argv(a_document(accelerator="cuda"), plan, LAUNCH)
    assert "--gpu-memory-utilization=0.7800" in words
    assert not any("kv-cache-memory-bytes" in word for word in words)


def test_without_a_compiler_nothing_is_compiled_on_first_use_either() -> None:
    launch = Launch(**{**_fields(LAUNCH), "eager": True})
    assert desired_environment(a_document(), launch, {})["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in desired_environment(a_document(), LAUNCH, {})


def test_what_would_undo_the_plan_is_not_handed_on() -> None:
    given = {
        "VLLM_CPU_KVCACHE_SPACE": "40",
        "FLEETKEEPER_ENGINE": "{}",
        "PYTHONPATH": "/else",
        "VLLM_API_KEY": "key",
        "OMP_NUM_THREADS": "2",
    }
    child = desired_environment(a_document(), LAUNCH, given)
    assert "VLLM_CPU_KVCACHE_SPACE" not in child
    assert "FLEETKEEPER_ENGINE" not in child
    assert child["VLLM_API_KEY"] == "key"
    assert child["PYTHONPATH"] == "/opt/own:/else"
    assert child["OMP_NUM_THREADS"] == "2", "the pod's own setting wins"
    assert desired_environment(a_document(), LAUNCH, {})["OMP_NUM_THREADS"] == "4"
    assert child["FLEETKEEPER_SHARED_MEMORY"] == "/dev/shm/fleetkeeper/shared-memory"
    assert child["HF_HUB_OFFLINE"] == "1"
    assert json.loads(child[SETTINGS])["internal_token"] == "secret-mark"


def _fields(launch: Launch) -> dict[str, Any]:
    return {name: getattr(launch, name) for name in Launch.__dataclass_fields__}


# The machine ------------------------------------------------------------------------------------


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_cgroup_v1_counts_what_is_not_page_cache(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "kubepods" / "pod1"
    write(tmp_path / "memory", memory__usage_in_bytes="1", memory__limit_in_bytes=str(1 << 62))
    write(
        group,
        memory__usage_in_bytes="1000",
        memory__stat="cache 500\ntotal_inactive_file 300\ntotal_active_file 100\n",
        memory__limit_in_bytes="2000",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    )
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/x\n4:memory:/kubepods/pod1\n0::/\n")
    found = Cgroup.of_this_process(tmp_path, membership)
    assert found is not None
    assert (found.version, found.used_bytes(), found.limit_bytes(), found.oom_kills()) == (
        1,
        600,
        2000,
        3,
    )


def test_cgroup_v2_in_a_container_is_the_mounts_root(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup may be the node's; only the container's group is mounted."""
    write(
        tmp_path,
        memory__current="1000",
        memory__stat="anon 500\ninactive_file 200\nactive_file 50\nshmem 30\n",
        memory__max="max",
        memory__events="low 0\noom 1\noom_kill 1\n",
    )
    membership = tmp_path / "cgroup"
    membership.write_text("0::/kubepods.slice/of-the-node\n")
    found = Cgroup.of_this_process(tmp_path, membership)
    assert found is not None
    assert (found.version, found.used_bytes(), found.limit_bytes(), found.oom_kills()) == (
        2,
        750,
        None,
        1,
    )


def test_a_limit_above_the_group_counts_too(tmp_path: Path) -> None:
    write(tmp_path / "pod", memory__max="4096", memory__current="0", memory__stat="")
    write(tmp_path / "pod" / "engine", memory__max="max", memory__current="0", memory__stat="")
    assert Cgroup(tmp_path / "pod" / "engine", 2).limit_bytes() == 4096


def test_without_a_memory_controller_there_is_no_cgroup(tmp_path: Path) -> None:
    assert Cgroup.of_this_process(tmp_path, tmp_path / "absent") is None
    assert Cgroup(tmp_path, 2).oom_kills() == 0


def test_the_cpu_quota_is_read_from_both_versions(tmp_path: Path) -> None:
    member = tmp_path / "member"
    member.write_text("3:cpu:/a\n0::/a\n")
    assert read_cpu_quota(tmp_path, member) is None
    write(tmp_path / "two" / "a", cpu__max="150000 100000")
    assert read_cpu_quota(tmp_path / "two", member) == 1.5
    write(tmp_path / "one" / "cpu" / "a", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert read_cpu_quota(tmp_path / "one", member) is None
    write(tmp_path / "one" / "cpu" / "a", cpu__cfs_quota_us="50000")
    assert read_cpu_quota(tmp_path / "one", member) == 0.5


class RecordedNvml:
    """Answers as NVML did on a machine with four devices of 80 GiB; device 2 is the fullest."""

    USED: ClassVar = {"0": 10, "1": 20, "2": 60, "GPU-aaaa": 30, "MIG-bbbb": 5}

    def nvmlInit(self) -> None:
        return None

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        total = 10 if handle.startswith("MIG") else 80
        used = self.USED[handle]
        return SimpleNamespace(total=total * GIB, used=used * GIB, free=(total - used) * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[SimpleNamespace]:
        return []


@pytest.mark.parametrize(
    ("visible", "ranks", "used", "ratio"),
    [
        ("", 1, [10], 10 / 80),
        ("", 3, [10, 20, 60], 60 / 80),
        ("2,1", 2, [60, 20], 60 / 80),
        ("GPU-aaaa", 1, [30], 30 / 80),
        ("MIG-bbbb", 1, [5], 0.5),
    ],
)
def test_the_fullest_of_the_engines_own_devices_counts(
    visible: str, ranks: int, used: list[int], ratio: float
) -> None:
    devices = DeviceReader(RecordedNvml(), {"CUDA_VISIBLE_DEVICES": visible}, ranks)
    assert [device.used_bytes // GIB for device in devices.read()] == used
    assert device_reader(devices)().ratio == pytest.approx(ratio)


def test_by_hand_memory_is_that_of_the_process_and_its_descendants(tmp_path: Path) -> None:
    def a_process(pid: int, children: str, kilobytes: int) -> None:
        write(
            tmp_path / str(pid),
            status=f"Name: x\nRssAnon:\t{kilobytes} kB\nRssShmem:\t1 kB\nRssFile:\t999 kB\n",
        )
        write(tmp_path / str(pid) / "task" / str(pid), children=children)

    a_process(1, "2 3 ", 10)
    a_process(2, "4 ", 20)
    a_process(4, "", 40)
    use = process_reader(1, 1000 * 1024, tmp_path)()
    assert use.used_bytes == (10 + 20 + 40 + 3) * 1024


def test_a_measurement_is_kept_for_the_same_engine_only(tmp_path: Path) -> None:
    assert read_measured(tmp_path, "key") is None
    write_measured(tmp_path, "key", 123)
    assert read_measured(tmp_path, "key") == 123
    assert read_measured(tmp_path, "another") is None
    (tmp_path / "measured.json").write_text('{"key": "key", "bytes": "many"}')
    assert read_measured(tmp_path, "key") is None


# What is installed --------------------------------------------------------------------------------


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


# Children -----------------------------------------------------------------------------------------


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
    await asyncio.wait_for(child.tee, 10)  # the pipe closes only when the grandchild is gone too


async def test_a_child_that_ends_at_once_is_not_missed(reaper: Reaper) -> None:
    for _ in range(20):
        child = await reaper.spawn(["/bin/true"], {})
        assert await asyncio.wait_for(child.ended, 10) == 0


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
