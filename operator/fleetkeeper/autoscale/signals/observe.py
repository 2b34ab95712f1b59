"""Observe a service: from the samples of its pods to its signals.

A small immutable memory per service (`SignalsMemory`) holds recent samples, and rates are computed from
successive samples. No value is trusted before it is checked (`samples.why_impossible`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from fleetkeeper.autoscale.constants import (
    COVERAGE_RATIO,
    HANG_S,
    REFERENCE_DECAY,
    TOKENS_EWMA_S,
    WINDOW_S,
    WINDOWS_KEPT,
)
from fleetkeeper.autoscale.signals.fleet_sums import with_sums
from fleetkeeper.autoscale.signals.pod_history import (
    PodTrack,
    accept,
    grade_of,
    has_rates,
    is_old,
    is_overdue,
    is_warmed_up,
)
from fleetkeeper.autoscale.signals.reported_runs import hang_runs
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.signals.service_signals import Signals, SignalsMemory, TokenUse
from fleetkeeper.autoscale.signals.windows import Window, close_window
from fleetkeeper.autoscale.types import Grade, PodView


def observe_service(
    samples: Sequence[PodSample], pods: Sequence[PodView], memory: SignalsMemory, now: float
) -> tuple[Signals, SignalsMemory]:
    """Return the signals of a service and the new memory.

    Samples of pods that do not exist, are not ready or are being deleted are not used. Those of pods that
    are warming up are only remembered. If fewer than half of the warmed-up pods report, the grade is
    STALE.
    """
    tracks = _updated_tracks(samples, pods, memory, now)
    rejudged = _is_rejudged(tracks, memory)
    if rejudged:
        memory = replace(memory, windows=())
    warmed_up = [pod.name for pod in pods if is_warmed_up(pod, now)]
    graded = {name: grade_of(tracks.get(name), now) for name in warmed_up}
    reporting = [
        name
        for name in warmed_up
        if graded[name] is not Grade.STALE
        and has_rates(tracks[name], now)
        and not tracks[name].history[-1].missing
    ]
    hangs = hang_runs(samples, pods, memory.hangs, now)
    # A hung pod counts as reporting, but its values are not part of the signals.
    usable = [name for name in reporting if name not in hangs]
    memory, window = _windows(replace(memory, hangs=hangs), tracks, usable, now)
    known = [tracks[name] for name in warmed_up if name in tracks]
    ready = sum([pod.ready and not pod.deleting for pod in pods])
    signals = Signals(
        grade=_service_grade(graded, reporting, hangs),
        coverage=len(usable) / ready if ready else 0.0,
        ready_pods=ready,
        hung_pods=tuple(sorted(hangs)),
        long_hung_pods=tuple(sorted([name for name, run in hangs.items() if run.lasted(HANG_S)])),
        missing=tuple(sorted({n for t in known if t.newest for n in t.newest.missing})),
        windows=memory.windows,
        window=window,
        overdue_pods=sum([is_overdue(tracks[name], now) for name in usable]),
        warmed_up_pods=len(warmed_up),
        old_pods=sum([is_old(tracks.get(name), now) for name in warmed_up]),
        rejudged=rejudged,
    )
    if not usable:
        return signals, memory
    return with_sums(signals, [memory.tracks[name] for name in usable], memory.tokens), memory


def _is_rejudged(tracks: Mapping[str, PodTrack], memory: SignalsMemory) -> bool:
    """Return whether a pod's samples use other bucket boundaries than before: the objectives changed."""
    return any(
        track is not before and before.history and track.edges != before.edges
        for name, track in tracks.items()
        if (before := memory.tracks.get(name)) is not None
    )


def _updated_tracks(
    samples: Sequence[PodSample], pods: Sequence[PodView], memory: SignalsMemory, now: float
) -> dict[str, PodTrack]:
    tracks = {
        pod.name: memory.tracks.get(pod.name) or PodTrack(pod.name)
        for pod in pods
        if pod.ready and not pod.deleting
    }
    for sample in samples:
        track = tracks.get(sample.pod)
        if track is not None:
            tracks[sample.pod] = accept(track, sample, memory.slowest_step_s, now)
    return tracks


def _service_grade(
    graded: Mapping[str, Grade], reporting: Sequence[str], hung: Container[str]
) -> Grade:
    """Return the grade of the service: half of the warmed-up pods must report, fresh for FRESH."""
    needed = COVERAGE_RATIO * len(graded)
    if not reporting or len(reporting) < needed:
        return Grade.STALE
    fresh = sum([name in hung or graded[name] is Grade.FRESH for name in reporting])
    return Grade.FRESH if fresh >= needed else Grade.AGEING


def _windows(
    memory: SignalsMemory, tracks: dict[str, PodTrack], usable: Sequence[str], now: float
) -> tuple[SignalsMemory, Window | None]:
    """Close the window when its time is over, and mark the start of the next."""
    windows, slowest, tokens = memory.windows, memory.slowest_step_s, memory.tokens
    if now - memory.window_start < WINDOW_S - 0.5:
        return replace(memory, tracks=tracks), None
    window = close_window(tracks, usable)
    marked = {
        name: PodTrack(name, t.history, t.newest, t.rejected, t.out_until)
        for name, t in tracks.items()
    }
    if window is None:
        return replace(memory, tracks=marked, window_start=now), None
    slowest *= REFERENCE_DECAY
    if window.steps > 0:
        slowest = max(slowest, window.seconds / window.steps)
    windows = (*windows, window)[-WINDOWS_KEPT:]
    tokens = _token_use(tokens, window)
    return SignalsMemory(marked, windows, now, slowest, tokens, memory.hangs), window


def _token_use(before: TokenUse, window: Window) -> TokenUse:
    keep = max(0.0, 1.0 - (window.end - window.start) / TOKENS_EWMA_S)
    return TokenUse(
        requests=before.requests * keep + window.scheduled,
        prompt=before.prompt * keep + window.prompt_tokens,
        generation=before.generation * keep + window.generation_tokens,
    )
