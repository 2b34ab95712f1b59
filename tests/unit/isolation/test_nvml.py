"""Memory of a shared device: only this pod's processes count, and what cannot be told is said."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetkeeper_engine.devices.nvidia import NvidiaDevices, process_bytes
from fleetkeeper_engine.devices.processes import is_descendant
from fleetkeeper_engine.supervisor.memory.watch import MemoryState, decide_memory, fullest

GIB = 1024**3
OURS, NEIGHBOR = 4711, 815


class NVMLError(Exception):
    pass


class SharedNvml:
    """One device of 80 GiB as pynvml shows it: used is of all processes, usedGpuMemory may be None."""

    NVMLError = NVMLError

    def __init__(self, processes: dict[int, int | None], used: int) -> None:
        self.processes = processes
        self.used = used
        self.lists = True

    def nvmlInit(self) -> None:
        return None

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIB, used=self.used * GIB, free=(80 - self.used) * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[SimpleNamespace]:
        if not self.lists:
            raise NVMLError("Not Supported")
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if used is None else used * GIB)
            for pid, used in self.processes.items()
        ]


def reader(nvml: SharedNvml) -> NvidiaDevices:
    return NvidiaDevices(nvml, {}, 1, is_own=lambda pid: pid == OURS)


@pytest.mark.parametrize(
    ("processes", "used", "counted", "own"),
    [
        ({OURS: 30, NEIGHBOR: 40}, 71, 30, True),
        ({OURS: 30}, 71, 30, True),  # the driver hides the neighbor
        ({NEIGHBOR: 40}, 71, 71, False),  # or us
        ({}, 71, 71, False),  # or all
        ({OURS: None, NEIGHBOR: None}, 71, 71, False),
        ({OURS: 30, NEIGHBOR: None}, 71, 30, True),
    ],
)
def test_only_our_own_processes_count_and_what_cannot_be_known_is_said(
    processes: dict[int, int | None], used: int, counted: int, own: bool
) -> None:
    (device,) = reader(SharedNvml(processes, used)).read()
    assert (device.used_bytes // GIB, device.own) == (counted, own)
    assert device.ratio == counted / 80


@pytest.mark.parametrize(
    ("processes", "own"),
    [
        ({OURS: 30, NEIGHBOR: 40}, 30),
        ({NEIGHBOR: 40}, None),  # the driver lists the node's numbers, or hides us
        ({}, None),
        ({OURS: None}, None),
    ],
)
def test_a_worker_asks_for_its_own_process(
    processes: dict[int, int | None], own: int | None
) -> None:
    found = process_bytes(SharedNvml(processes, 71), {}, 0, OURS)
    assert found == (None if own is None else own * GIB)


def test_a_device_that_nvml_cannot_name_or_list_has_no_known_processes() -> None:
    nvml = SharedNvml({OURS: 30}, 71)
    assert process_bytes(nvml, {}, 1, OURS) is None
    nvml.lists = False
    assert process_bytes(nvml, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, 0, OURS) is None


def test_a_driver_that_lists_no_processes_still_says_how_full_the_device_is() -> None:
    nvml = SharedNvml({OURS: 30}, 71)
    nvml.lists = False
    (device,) = reader(nvml).read()
    assert (device.used_bytes // GIB, device.own) == (71, False)


def test_once_seen_our_processes_are_not_taken_for_hidden_when_they_end() -> None:
    """A neighbor that fills the device after our worker ended is no memory of ours."""
    nvml = SharedNvml({OURS: 30}, 31)
    devices = reader(nvml)
    assert devices.read()[0].own
    nvml.processes, nvml.used = {NEIGHBOR: 70}, 71
    (device,) = devices.read()
    assert (device.used_bytes, device.own) == (0, True)


def test_a_neighbor_that_fills_the_device_stops_nothing_of_ours_and_is_no_peak() -> None:
    """Before our first process is listed the whole device counts; that peak is dropped with it."""
    nvml = SharedNvml({NEIGHBOR: 70}, 71)
    devices = reader(nvml)
    state = decide_memory(MemoryState(cap_ratio=0.8), fullest(devices.read()), 0.0)
    assert (state.peak_bytes // GIB, state.own) == (71, False)
    nvml.processes, nvml.used = {NEIGHBOR: 40, OURS: 30}, 71
    for second in range(1, 30):
        state = decide_memory(state, fullest(devices.read()), float(second))
    assert (state.peak_bytes // GIB, state.own, state.over_cap) == (30, True, False)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """1 (supervisor) -> 20 (vLLM) -> 30 (its worker); 40 came from elsewhere."""
    for pid, parent in ((1, 0), (20, 1), (30, 20), (40, 0)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (VLLM::(Engine) x) S {parent} 1 1 0")
    return tmp_path


def test_a_process_is_ours_when_it_descends_from_the_supervisor(proc: Path) -> None:
    """Pid 1 itself has no CUDA context: where NVML lists it, it speaks of the node's."""
    assert [pid for pid in (1, 20, 30, 40, 99) if is_descendant(pid, 1, proc)] == [20, 30]
    assert [pid for pid in (1, 20, 30, 40) if is_descendant(pid, 20, proc)] == [30]
    assert not is_descendant(os.getppid())
