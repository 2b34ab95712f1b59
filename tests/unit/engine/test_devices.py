"""The kinds of accelerators, as the rest of the engine asks them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fleetkeeper_engine.devices import nvidia
from fleetkeeper_engine.devices.cpu import PodMemory
from fleetkeeper_engine.devices.interface import Accelerator, NoDevicesError
from fleetkeeper_engine.devices.kinds import KINDS, allocator_of
from fleetkeeper_engine.devices.nvidia import TorchAllocator

CUDA, CPU = KINDS[Accelerator.CUDA], KINDS[Accelerator.CPU]


GIB = 1024**3


def a_driver(monkeypatch: pytest.MonkeyPatch, *used_gib: int) -> None:
    """NVML with devices of 80 GiB; no driver without any."""
    nvml = SimpleNamespace(
        nvmlDeviceGetCount=lambda: len(used_gib),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(
            total=80 * GIB, used=used_gib[handle] * GIB
        ),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [],
    )
    monkeypatch.setattr(nvidia, "load_nvml", lambda: nvml if used_gib else None)


def test_each_accelerator_of_the_document_has_a_kind() -> None:
    assert set(KINDS) == set(Accelerator)
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)
    assert all(kind.out_of_memory for kind in KINDS.values()), "an empty pattern matches each line"


def test_without_a_driver_the_cpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    a_driver(monkeypatch)
    assert CUDA.missing() == "driver or nvidia-ml-py missing"
    with pytest.raises(
        NoDevicesError, match=r"accelerator cuda needs 2 NVIDIA device\(s\) and NVML"
    ):
        CUDA.open({}, 2, 0)
    assert CPU.missing() == ""
    assert isinstance(CPU.open({}, 2, 1024), PodMemory)


def test_an_engine_with_more_ranks_than_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a_driver(monkeypatch, 71)
    assert CUDA.missing() == ""
    assert [device.used_bytes // GIB for device in CUDA.open({}, 1, 0).read()] == [71]
    assert len(CUDA.open({}, None, 0).read()) == 1
    with pytest.raises(NoDevicesError, match="needs 2 NVIDIA"):
        CUDA.open({}, 2, 0)


@pytest.mark.parametrize(
    ("type_", "index", "expected"),
    [("cuda", 1, TorchAllocator(1)), ("cuda", None, TorchAllocator(0)), ("cpu", None, None)],
)
def test_a_worker_gets_the_allocator_of_its_device(
    type_: str, index: int | None, expected: TorchAllocator | None
) -> None:
    assert allocator_of(SimpleNamespace(type=type_, index=index)) == expected
