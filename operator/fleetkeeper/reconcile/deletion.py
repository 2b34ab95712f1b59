"""The order in which a scale-down removes pods: those with the least load first.

Kubernetes removes pods that are not ready first, then those with the lowest deletion cost. A mark
(the deletion cost that Fleetkeeper sets) is never removed. The next mark is lower, which makes an
old mark harmless on a pod whose load has grown since.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetkeeper.reconcile.observe.facts import Facts
from fleetkeeper.reconcile.plan import MarkPod


def decide_marks(facts: Facts, value: int, load: Mapping[str, float]) -> tuple[MarkPod, ...]:
    """Return the pods to mark before the engine Deployment is scaled down to `value` replicas.

    `load` is the number of running and waiting sequences by pod name. A pod without a figure is
    never chosen. Nothing is marked if only unready pods are to be removed, or if Kubernetes would
    already choose the same pods.

    Worked example: with loads {a: 3, b: 0, c: 7}, a scale-down from 3 to 2 marks b with -1; one
    from 3 to 1 marks b with -2 and a with -1.
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
