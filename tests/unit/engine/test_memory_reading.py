"""Memory and CPU limits, as cgroups, NVML and processes report them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from fleetkeeper_engine.devices.cgroup import Cgroup, read_cpu_quota
from fleetkeeper_engine.devices.cpu import PodMemory
from fleetkeeper_engine.devices.nvidia import NvidiaDevices
from fleetkeeper_engine.supervisor.memory.watch import fullest

GIB = 1024**3


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
    devices = NvidiaDevices(RecordedNvml(), {"CUDA_VISIBLE_DEVICES": visible}, ranks)
    assert [device.used_bytes // GIB for device in devices.read()] == used
    assert fullest(devices.read()).ratio == pytest.approx(ratio)


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
    (use,) = PodMemory(1000 * 1024, None, 1, tmp_path).read()
    assert use.used_bytes == (10 + 20 + 40 + 3) * 1024
