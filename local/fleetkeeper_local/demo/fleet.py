"""One InferenceService as a user sees it: its status, its pods, its address."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.cluster import Cluster, Live

ENGINE, ROUTER = "engine", "router"
POLL_S = 0.5
NO_PROGRESS_S = 600.0
"""An engine on a busy machine takes minutes to start and shows no progress meanwhile."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The facts about a pod that tests and the demo use."""

    name: str
    uid: str
    ip: str
    ready: bool
    leaving: bool
    restarts: int
    started: str
    """Start time of its container; empty before it starts."""
    ended: str
    """Reason for its container's last termination (OOMKilled, Error, ...); empty if none."""
    image: str

    @property
    def identity(self) -> tuple[str, int, str]:
        """Equal before and after if and only if nothing was restarted."""
        return (self.uid, self.restarts, self.started)


def pod_facts(pod: Live) -> PodFacts:
    """Return the facts about a pod with one container."""
    status = pod["status"]
    containers = status.get("containerStatuses") or [{}]
    first = containers[0]
    state = first.get("state") or {}
    ended = (first.get("lastState") or {}).get("terminated") or state.get("terminated") or {}
    return PodFacts(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        ip=status.get("podIP", ""),
        ready=bool(first.get("ready")),
        leaving="deletionTimestamp" in pod["metadata"],
        restarts=int(first.get("restartCount", 0)),
        started=str((state.get("running") or {}).get("startedAt", "")),
        ended=str(ended.get("reason", "")),
        image=pod["spec"]["containers"][0]["image"],
    )


class Fleet:
    """The InferenceService `name` in `namespace`."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        """Store the names; nothing is requested yet."""
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.said: Callable[[str], None] = lambda _text: None
        """Called with each new state during a wait."""

    # -- state --------------------------------------------------------------------------------

    def live(self) -> Live:
        """Return the resource.

        Raises:
            LocalError: it does not exist.
        """
        found = self.cluster.inference_service(self.namespace, self.name)
        if found is None:
            raise LocalError(f"InferenceService {self.namespace}/{self.name} does not exist")
        return found

    def status(self) -> Live:
        """Return its status; empty before the operator's first reconcile."""
        status: Live = self.live().get("status") or {}
        return status

    def condition(self, kind: str) -> Live:
        """Return a condition; empty if it is absent."""
        return condition_of(self.live(), kind)

    def engines(self) -> list[PodFacts]:
        """Return its engine pods that are not terminating, oldest first."""
        return [pod for pod in self.pods(ENGINE) if not pod.leaving]

    def pods(self, component: str) -> list[PodFacts]:
        """Return all pods of a component, oldest first."""
        selector = f"fleetkeeper.io/service={self.name},fleetkeeper.io/component={component}"
        return [pod_facts(pod) for pod in self.cluster.pods(self.namespace, selector)]

    def base_url(self) -> str:
        """Return the URL of the API, for clients on the cluster's nodes."""
        return f"http://{self.cluster.cluster_ip(self.namespace, self.name)}/v1"

    # -- changes ------------------------------------------------------------------------------

    def kubectl(self, *args: str, given: str | None = None) -> str:
        """Run kubectl in its namespace."""
        return self.cluster.kubectl("-n", self.namespace, *args, given=given)

    def change(self, spec: Live) -> None:
        """Merge into its spec (null removes)."""
        self.kubectl(
            *("patch", "inferenceservices.fleetkeeper.io", self.name, "--type=merge", "-p"),
            json.dumps({"spec": spec}),
        )

    # -- waits --------------------------------------------------------------------------------

    def until(
        self,
        question: Callable[[], Any],
        what: str,
        no_progress_s: float = NO_PROGRESS_S,
    ) -> Any:  # noqa: ANN401 - the question's own result
        """Return the first result of `question` that is true; wait while the fleet makes progress.

        Raises:
            LocalError: the state of the fleet did not change for `no_progress_s`; the text is its
                summary.
        """
        last, since_s = "", time.monotonic()
        while not (answer := question()):
            shown = self.summary()
            if shown != last:
                self.said(shown)
                last, since_s = shown, time.monotonic()
            if time.monotonic() - since_s > no_progress_s:
                raise LocalError(
                    f"{self.namespace}/{self.name}: {what}: no progress for {no_progress_s:.0f} s; {shown}"
                )
            time.sleep(POLL_S)
        return answer

    def await_ready(self, replicas: int | None = None) -> None:
        """Return once its current generation is Ready, with this number of replicas if given."""
        wanted = "Ready" if replicas is None else f"Ready with {replicas} replicas"
        self.until(lambda: self.is_ready(replicas), wanted)

    def pin(self, replicas: int) -> None:
        """Set spec.replicas and return once they are ready; they stay until `unpin`."""
        self.change({"replicas": replicas})
        self.await_ready(replicas)

    def unpin(self) -> None:
        """Let the control loop choose the number of replicas again."""
        self.change({"replicas": None})

    def is_ready(self, replicas: int | None = None) -> bool:
        """Return whether its generation is Ready, with exactly `replicas` ready pods if given."""
        live = self.live()
        if not ready_in_its_generation(live):
            return False
        return replicas is None or self._stands_at(replicas)

    def _stands_at(self, replicas: int) -> bool:
        pods = self.pods(ENGINE)
        return len(pods) == replicas and all(pod.ready and not pod.leaving for pod in pods)

    def summary(self) -> str:
        """Return one line: the Ready condition with its reason, and the pods."""
        pods = ", ".join(_pod_words(pod) for pod in self.pods(ENGINE)) or "no pods"
        live = self.cluster.inference_service(self.namespace, self.name)
        if live is None:  # its pods may outlive it
            return f"no InferenceService [{pods}]"
        ready = condition_of(live, "Ready")
        return f"Ready={ready.get('status', '?')} {ready.get('reason', '')}: {ready.get('message', '')} [{pods}]"


def _pod_words(pod: PodFacts) -> str:
    state = "terminating" if pod.leaving else "ready" if pod.ready else "not ready"
    restarts = f", {pod.restarts} restarts ({pod.ended})" if pod.restarts else ""
    return f"{pod.name} {state}{restarts}"


def condition_of(live: Live, kind: str) -> Live:
    """Return a condition of the resource; empty if it is absent."""
    found = (live.get("status") or {}).get("conditions") or []
    return next((item for item in found if item["type"] == kind), {})


def ready_in_its_generation(live: Live) -> bool:
    """Return whether Ready is True for the current generation of the spec."""
    generation = live["metadata"]["generation"]
    ready = condition_of(live, "Ready")
    return (
        ready.get("status") == "True"
        and ready.get("observedGeneration") == generation
        and (live.get("status") or {}).get("observedGeneration") == generation
    )
