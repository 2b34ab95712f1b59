"""A prepared start: everything that the supervisor needs to start and to watch an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fleetkeeper_engine.devices.cgroup import Cgroup
from fleetkeeper_engine.devices.interface import Devices
from fleetkeeper_engine.spec import EngineDocument
from fleetkeeper_engine.supervisor.launch.features import Features
from fleetkeeper_engine.supervisor.launch.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is needed to start and to watch vLLM."""

    argv: list[str]
    environment: dict[str, str]
    plan: MemoryPlan
    features: Features
    internal_token: str
    measured_key: str
    planned_bytes: int
    """The share of a device that vLLM may use; on CPU, weights and cache. Use beyond this is measured."""
    devices: Devices


def pod_limit_bytes(document: EngineDocument) -> int:
    """Return the memory that the pod may use.

    It is the lowest of the document's and the cgroup's limit, or the machine's memory without
    either.
    """
    group = Cgroup.of_this_process()
    known = [document.memory.limit_bytes, group.limit_bytes() if group else None]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([limit for limit in known if limit is not None], default=machine)
