"""The weight of the node for the kernel's scheduler, beside what else runs on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fleetkeeper_local.node.cleanup import kubepods_cgroups

COMPONENT_NICE: Final = -3
"""Of the session of a component: twice the weight of another session."""
POD_WEIGHTS: Final = {"cpu.shares": 4_096, "cpu.weight": 400}
"""Of all pods together, by version of cgroups: four times the weight of another session."""


def raise_weights(components: Iterable[int]) -> None:
    """Double the share of the node's processes and pods on a busy machine.

    The kernel weighs each session of processes as one group (sched_autogroup), and the kubelet gives
    all pods the weight of two. Beside 20 busy sessions the pods of a node with two processors had 0.2 of
    one: kubelet's probes of routers timed out, and services without a ready router refused connections.
    Pods alone must not weigh more: when engines started, the API server timed out. With the
    weight of ten sessions for the pods and for each process, operators beside the node lost their Leases.

    Args:
        components: the pids of the node's own processes, each a session of its own.
    """
    for pid in components:
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():  # the kernel may be built without it
            group.write_text(str(COMPONENT_NICE))
    for cgroup in kubepods_cgroups():
        for name, weight in POD_WEIGHTS.items():
            if (cgroup / name).exists():
                (cgroup / name).write_text(str(weight))
