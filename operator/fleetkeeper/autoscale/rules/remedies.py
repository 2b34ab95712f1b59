"""Remedies: bounded responses to engine failures. Each step stays in force until the spec changes."""

from __future__ import annotations

from collections.abc import Sequence

from fleetkeeper.autoscale.constants import (
    HUNG_EVERY_S,
    REMEDY_CAP_STEP,
    REMEDY_MIN_CAP,
    REMEDY_STEPS,
)
from fleetkeeper.autoscale.types import ControlSettings, Decision, PodView, decide, no_change
from fleetkeeper.common.values import Remedy

OUT_OF_MEMORY = "CUDAOutOfMemory"


def remedy_in_force(remedy: Remedy | None, settings: ControlSettings) -> Remedy | None:
    """Return the remedy, or None once the spec has changed."""
    return remedy if remedy is not None and remedy.generation == settings.generation else None


def decide_memory_remedy(
    remedy: Remedy | None,
    settings: ControlSettings,
    pods: Sequence[PodView],
    out_of_memory_pods: Sequence[str],
    now: float,
) -> Decision[Remedy | None]:
    """Decide the next step after an engine ran out of accelerator memory; at most four steps.

    Start-up sequences are halved twice if the floor allows it, then the cap is lowered by 5 points.
    Example: 256 sequences at 80%: 128, 64, then 75%, then 70%, then a person has to act.
    """
    current = remedy_in_force(remedy, settings)
    since = current.since if current is not None else 0.0
    hit = [pod.name for pod in pods if pod.name in out_of_memory_pods and pod.created > since]
    if not hit:
        return no_change(current, "NoRemedy", "no engine ran out of memory")
    attempts = current.attempts if current is not None else 0
    sequences = current.max_sequences if current is not None else settings.max_sequences
    cap = current.cap_percent if current is not None else settings.cap_percent
    if attempts >= REMEDY_STEPS:
        return no_change(
            current,
            "RemediesExhausted",
            f"pod {hit[0]} ran out of memory after {attempts} remedies",
        )
    if attempts < REMEDY_STEPS // 2 and sequences // 2 >= settings.min_sequences:
        sequences //= 2
        what = f"engines now start with at most {sequences} sequences"
    elif cap - REMEDY_CAP_STEP >= REMEDY_MIN_CAP:
        cap -= REMEDY_CAP_STEP
        what = f"the memory cap is now {cap}%"
    else:
        return no_change(
            current, "RemediesExhausted", f"pod {hit[0]} ran out of memory at the lowest cap"
        )
    step = Remedy(OUT_OF_MEMORY, sequences, cap, attempts + 1, settings.generation, now)
    return decide(step, OUT_OF_MEMORY, f"pod {hit[0]} ran out of accelerator memory: {what}")


def pod_to_replace(
    hung_pods: Sequence[str], replaced_at: float, now: float, *, last: str, paused: bool
) -> str:
    """Return the pod with a hung engine that is replaced now, if any: one at a time, two minutes apart.

    The supervisor in the pod restarts a hung engine first. This is for a pod that stays hung. Pods are
    chosen round-robin by name, starting after `last`, the previous choice: a pod that does not confirm
    that it is hung stays, and must not block the others. `paused` (spec.paused): no pod is replaced.
    """
    if not hung_pods or paused or now - replaced_at < HUNG_EVERY_S:
        return ""
    return min(hung_pods, key=lambda pod: (pod <= last, pod))
