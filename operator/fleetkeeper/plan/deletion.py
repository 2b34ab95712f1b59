"""Which pods go first when replicas are taken away: the emptiest.

Kubernetes removes pods that are not ready first, then those with the lowest deletion cost. A mark is
never taken back: the next one is lower, so that an old mark on a pod that has filled up since does
not count.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetkeeper.plan.facts import Facts
from fleetkeeper.plan.model import MarkPod


def decide_marks(facts: Facts, value: int, load: Mapping[str, float]) -> tuple[MarkPod, ...]:
    """The pods to mark before the engine Deployment goes down to `value`.

    `load` holds the sequences that run and wait, by pod name; without a figure a pod is never
    chosen. Nothing is marked when only pods go that are not ready, or when Kubernetes would choose
    the same ones already.

    Worked example: loads {a: 3, b: 0, c: 7} and 3 -> 2 marks b with -1; 3 -> 1 marks b with -2 and
    a with -1.
    """
    pods = facts.engine_pods
    ready = [pod for pod in pods if pod.ready]
    going = min(len(ready), max(0, len(pods) - value) - (len(pods) - len(ready)))
    known = [pod for pod in ready if pod.name in load]
    chosen = sorted(known, key=lambda pod: (load[pod.name], -pod.created, pod.name))
    if going <= 0 or going == len(ready) or len(chosen) < going:
        return ()
    chosen = chosen[:going]
    others = [pod.deletion_cost for pod in ready if pod not in chosen]
    if max(pod.deletion_cost for pod in chosen) < min(others):
        return ()
    lowest = min(0, *(pod.deletion_cost for pod in ready))
    return tuple(
        MarkPod(pod.name, pod.uid, lowest - going + place) for place, pod in enumerate(chosen)
    )
