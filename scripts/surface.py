"""The interfaces between releases that no other generated file shows: tests/golden/surface.yaml.

A change of structure must not change it. Where a change is meant, the file shows it in review, and the
version beside it must change too: pods of an earlier release keep running during an upgrade.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import yaml

from fleetkeeper.api import names
from fleetkeeper_contract import batch_metrics, client_keys, grants, headers, usage_files
from fleetkeeper_engine.shm import codec, layout, ledger
from fleetkeeper_gateway.batch.queue import link
from fleetkeeper_gateway.limits.names import names_of

PATH = "tests/golden/surface.yaml"
BLOCKS = (
    layout.SupervisorBlock,
    layout.MiddlewareBlock,
    layout.SchedulerBlock,
    layout.HeartbeatBlock,
    layout.CapBlock,
    layout.LoadBlock,
)


def constants(module: ModuleType) -> dict[str, Any]:
    """Return the public constants of a module that YAML can show."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if not name.isupper() or name.startswith("_"):
            continue
        if isinstance(value, tuple) and all(type(item) is str for item in value):
            found[name] = list(value)
        elif type(value) in {str, int, float}:
            found[name] = value
    return found


def surface() -> dict[str, Any]:
    """Return what is shared, by who shares it."""
    limits = names_of("KEY", "TIER")
    return {
        "shared memory of an engine pod": {
            "version": codec.VERSION,
            **{
                kind.__name__: [f"{name} {code}{count}" for name, code, count in table]
                for kind in BLOCKS
                for table in (layout.Layout(kind).table,)
            },
        },
        "ledger of an engine": constants(ledger),
        "Redis": {
            "batches": link.PREFIX,
            "limits": sorted({name.decode() for name in limits.admit + limits.renew}),
        },
        "files of usage": constants(usage_files),
        "names of Kubernetes": constants(names),
        "contract": {
            module.__name__.rpartition(".")[2]: constants(module)
            for module in (batch_metrics, client_keys, grants, headers)
        },
    }


def generated_files() -> dict[str, str]:
    """Return the file and its text."""
    head = "# Generated from the code by `make generate`; scripts/surface.py says why.\n"
    return {PATH: head + yaml.safe_dump(surface(), sort_keys=False, width=100)}
