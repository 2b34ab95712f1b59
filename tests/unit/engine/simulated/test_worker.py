"""The workers of a simulated engine in shared memory, and its faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleetkeeper_engine.devices.simulated import FRAGMENTING_S
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.simulated.server import out_of_memory_text, schedule_faults
from fleetkeeper_engine.simulated.simulation_settings import TimedFault
from fleetkeeper_engine.simulated.worker import Workers
from fleetkeeper_engine.supervisor.termination import classify_death


def ratios(region: Region) -> list[float]:
    caps = [region.read_cap(rank) for rank in range(region.ranks)]
    return [cap.fragmentation_ratio for cap in caps if cap is not None]


def test_every_rank_reports_its_load_and_its_allocator(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "region", ranks=2)
    workers = Workers(region, 0.8, clock=lambda: 5.0)
    assert region.all_loaded() is None
    workers.report_load()
    assert region.all_loaded() == 5.0
    workers.report()
    assert region.caps_armed()
    assert len(ratios(region)) == 2
    assert max(ratios(region)) < 0.05


def test_fragmentation_grows_until_most_of_the_reserved_memory_is_lost(tmp_path: Path) -> None:
    now = 0.0
    region = Region.create(tmp_path / "region")
    workers = Workers(region, 0.8, clock=lambda: now)
    found = []
    workers.fragment()
    for step in range(4):
        now = step * FRAGMENTING_S / 2
        workers.report()
        found += ratios(region)
    assert found == sorted(found)
    assert found[0] < 0.05
    assert found[2] == found[3] > 0.5


def test_without_a_supervisor_nothing_is_reported() -> None:
    workers = Workers(None, 0.8)
    workers.report_load()
    workers.report()


def test_exhausted_memory_is_classified_like_vllms() -> None:
    death = classify_death(out_of_memory_text(7).splitlines(), status=1, phase="serve")
    assert death.death == "CUDAOutOfMemory"
    assert "simulated" in death.message


async def test_faults_happen_in_their_order() -> None:
    happened: list[str] = []
    over = asyncio.Event()
    actions = {"Crash": over.set, "Freeze": lambda: happened.append("Freeze")}
    schedule_faults([TimedFault("Crash", 0.02), TimedFault("Freeze", 0.01)], actions)
    await asyncio.wait_for(over.wait(), 30)
    assert happened == ["Freeze"]
