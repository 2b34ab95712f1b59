"""The memory cap of CUDA workers, armed by the vLLM plugin."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_engine.in_vllm import plugin
from fleetkeeper_engine.in_vllm.vllm_settings import ENVIRONMENT, VllmSettings
from fleetkeeper_engine.shm.layout import CapBlock
from fleetkeeper_engine.shm.region import Region


class FakeDevice:
    """torch for one device of 80 GiB, of which 2 GiB lie outside the allocator."""

    process_list = "NVML"

    def __init__(self, device: Any) -> None:
        self.index = device.index
        self.fractions: list[float] = []

    def memory(self) -> tuple[int, int]:
        return 77 * 2**30, 80 * 2**30

    def reserved_bytes(self) -> int:
        return 2**30

    def allocated_bytes(self) -> int:
        return 2**29

    def own_bytes(self) -> int | None:
        return 3 * 2**30

    def set_fraction(self, fraction: float) -> None:
        self.fractions.append(fraction)


class BesideNeighbor(FakeDevice):
    """The same beside another process that takes 40 GiB."""

    def memory(self) -> tuple[int, int]:
        return 37 * 2**30, 80 * 2**30


class Hidden(BesideNeighbor):
    """The same, where NVML does not list this process."""

    def own_bytes(self) -> int | None:
        return None


class Worker:
    """A vLLM worker with the names that ours touches."""

    def __init__(self, kind: str = "cuda") -> None:
        self.kind = kind
        self.rank = 0
        self.device: Any = None

    def init_device(self) -> str:
        self.device = SimpleNamespace(type=self.kind, index=0)
        return "initialised"


@pytest.mark.promise("memory-cap")
def test_the_cap_is_armed_after_the_device_is_set_and_reported_in_shared_memory(
    region: Region,
) -> None:
    """(0.8 x 80 - 2) / 80 = 0.775 of the device for the allocator; a second wrap changes nothing."""
    devices: list[FakeDevice] = []

    def make(device: Any) -> FakeDevice:
        devices.append(FakeDevice(device))
        return devices[-1]

    class Wrapped(Worker):
        pass

    for _ in range(2):
        plugin.wrap(Wrapped, lambda worker: plugin.arm_worker(worker, make))
    assert not region.caps_armed()
    assert Wrapped().init_device() == "initialised"
    assert [device.fractions for device in devices] == [[pytest.approx(0.775)]]
    assert region.caps_armed()
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.total_bytes, cap.non_torch_bytes) == (80 * 2**30, 2 * 2**30)
    assert (cap.reserved_bytes, cap.allocated_bytes) == (2**30, 2**29)


def initialise(make: type[FakeDevice]) -> None:
    """Start a worker on such a device."""

    class Wrapped(Worker):
        pass

    plugin.wrap(Wrapped, lambda worker: plugin.arm_worker(worker, make))
    assert Wrapped().init_device() == "initialised"


def test_a_cap_that_cannot_be_armed_is_left_unarmed_and_logged(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker starts, the pod never turns ready, and shared memory says why."""

    class Full(FakeDevice):
        def own_bytes(self) -> int | None:
            return 70 * 2**30

    initialise(Full)
    assert not region.caps_armed()
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.armed, cap.own, cap.non_torch_bytes) == (False, True, 69 * 2**30)
    assert cap.refusal("NVML") in caplog.text
    assert "69.00 GiB of 80.00 GiB are in use outside torch's allocator" in cap.refusal("NVML")
    assert "NVML" not in cap.refusal("NVML")


@pytest.fixture
def settings(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, VllmSettings(cap_percent=40).to_json())


@pytest.mark.usefixtures("settings")
def test_the_memory_of_a_neighbor_is_not_taken_for_our_own(region: Region) -> None:
    """(0.4 x 80 - 2) / 80 = 0.375, as without the 40 GiB of a neighbor."""
    initialise(BesideNeighbor)
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.armed, cap.own, cap.non_torch_bytes) == (True, True, 2 * 2**30)
    assert cap.fraction == pytest.approx(0.375)


@pytest.mark.usefixtures("settings")
def test_a_process_that_nvml_does_not_list_counts_the_whole_device_and_says_so(
    region: Region,
) -> None:
    initialise(Hidden)
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.armed, cap.own, cap.non_torch_bytes) == (False, False, 42 * 2**30)
    assert "other processes on device 0 count, because NVML does not list this one" in cap.refusal(
        "NVML"
    )


def test_a_listed_process_with_less_than_our_allocator_reserved_is_not_ours(region: Region) -> None:
    """Its number is that of another PID namespace."""

    class Foreign(FakeDevice):
        def own_bytes(self) -> int | None:
            return 2**29

    initialise(Foreign)
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.armed, cap.own, cap.non_torch_bytes) == (True, False, 2 * 2**30)


def test_on_cpu_there_is_no_allocator_to_hold(region: Region) -> None:
    """Plan and watch hold the cap there."""
    worker = Worker("cpu")
    worker.init_device()
    plugin.arm_worker(worker)
    assert region.read_cap(0) is None


@pytest.mark.promise("neighbor-memory")
@given(st.floats(0.1, 0.95), st.integers(2**30, 2**38), st.floats(0.0, 1.0))
def test_allocator_and_the_rest_stay_within_the_cap(cap: float, total: int, other: float) -> None:
    """What torch may take plus what lies outside it is at most the cap, or torch gets nothing."""
    non_torch = int(other * total)
    fraction = plugin.allocator_fraction(cap, total, non_torch)
    if fraction == 0.0:
        assert non_torch / total >= cap
        return
    assert 0.0 < fraction <= 1.0
    assert fraction * total + non_torch <= cap * total * (1 + 1e-9)


def test_fragmentation_figures_are_refreshed(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reporter writes what the allocator says now, keeping what was armed."""
    rounds = iter([None])

    def sleep(_: float) -> None:
        next(rounds)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(StopIteration):
        plugin.report_forever(
            region, 0, FakeDevice(SimpleNamespace(index=0)), CapBlock(armed=True, fraction=0.7)
        )
    cap = region.read_cap(0)
    assert cap is not None
    assert (cap.armed, cap.fraction, cap.reserved_bytes) == (True, 0.7, 2**30)
