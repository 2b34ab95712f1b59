"""The share of the processor that all pods have together, beside what else runs on this machine."""

from __future__ import annotations

from typing import Final

from fleetkeeper_local.node.cleanup import kubepods_cgroups

_SHARES: Final = {"cpu.shares": 10_240, "cpu.weight": 1_000}
"""By version of cgroups: ten times the default of one group."""


def give_pods_the_processor() -> None:
    """Let all pods together weigh as much as ten other groups.

    The kubelet gives them the weight of two on two cores. The kernel makes each session of processes a
    group (sched_autogroup), so beside ten busy ones a node on a developer's machine got a sixth of it:
    routers answered seconds late, which no node that serves nothing but pods does.
    """
    for group in kubepods_cgroups():
        for name, value in _SHARES.items():
            if (group / name).exists():
                (group / name).write_text(str(value))
