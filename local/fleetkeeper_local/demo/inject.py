"""Faults injected from outside, as a machine, a network or a bug would cause them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.fleet import PodFacts
from fleetkeeper_local.demo.installation import Installation

CGROUPS = Path("/sys/fs/cgroup")
CPU_PERIOD_US = 100_000


def processes_of(pod_uid: str, wanted: Callable[[str], bool]) -> list[int]:
    """Return the processes of this machine in a pod's cgroups whose command line is `wanted`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            groups = (folder / "cgroup").read_text()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # systemd's cgroup driver writes the UID with underscores.
        if pod_uid in groups.replace("_", "-") and wanted(command):
            found.append(int(folder.name))
    return found


def is_core(command: str) -> bool:
    """Return whether a command line is that of an engine's core: vLLM's, or a whole simulated engine."""
    return command.startswith("VLLM::EngineCore") or "fleetkeeper_engine.simulated" in command


def freeze_engine(pod: PodFacts) -> int:
    """Stop the core of a pod's engine as a hang would: its port stays open. Return its pid.

    Raises:
        LocalError: the pod has no such process on this machine.
    """
    cores = processes_of(pod.uid, is_core)
    if len(cores) != 1:
        raise LocalError(
            f"pod {pod.name} has {len(cores)} engine cores on this machine, expected one"
        )
    os.kill(cores[0], signal.SIGSTOP)
    return cores[0]


def cpu_quota_file(groups: str) -> Path:
    r"""Return the file with the CPU quota of a process, by its /proc/PID/cgroup.

    >>> str(cpu_quota_file("0::/kubepods/a"))
    '/sys/fs/cgroup/kubepods/a/cpu.max'
    >>> str(cpu_quota_file("3:cpu,cpuacct:/kubepods/a\n0::/kubepods/a"))
    '/sys/fs/cgroup/cpu,cpuacct/kubepods/a/cpu.cfs_quota_us'
    """
    rows = [line.split(":", 2) for line in groups.splitlines()]
    for _, controllers, group in rows:
        if "cpu" in controllers.split(","):
            return CGROUPS / controllers / group.lstrip("/") / "cpu.cfs_quota_us"
    return CGROUPS / rows[-1][2].lstrip("/") / "cpu.max"


@contextmanager
def slowed_engine(pod: PodFacts, cpus: float) -> Iterator[None]:
    """Let a pod's containers use only so many CPUs until the block is left.

    Raises:
        LocalError: the pod has no engine core on this machine.
    """
    cores = processes_of(pod.uid, is_core)
    if not cores:
        raise LocalError(f"pod {pod.name} has no engine core on this machine")
    quota = cpu_quota_file(Path(f"/proc/{cores[0]}/cgroup").read_text())
    before = quota.read_text()
    microseconds = str(round(cpus * CPU_PERIOD_US))
    # Only cgroup v2 takes the period in the same file; Kubernetes sets 100 ms in both.
    quota.write_text(f"{microseconds} {CPU_PERIOD_US}" if " " in before else microseconds)
    try:
        yield
    finally:
        quota.write_text(before)


def kill_operators(installation: Installation) -> int:
    """Kill every operator process on this machine with SIGKILL; return their number."""
    pids = [
        pid
        for pod in installation.operators()
        for pid in processes_of(
            pod["metadata"]["uid"], lambda command: "fleetkeeper run" in command
        )
    ]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)
