"""A fleet on the local node as its users and its operators meet it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import yaml

from fleetkeeper_local.common.report import say
from fleetkeeper_local.demo.cluster import Live
from fleetkeeper_local.demo.fleet import Fleet, PodFacts, pod_facts
from fleetkeeper_local.demo.inject import processes_of
from fleetkeeper_local.demo.installation import TINY, Installation, ensure_namespace
from fleetkeeper_local.demo.traffic import Traffic
from fleetkeeper_local.load.client import Patience
from fleetkeeper_local.load.open_loop import Sample
from fleetkeeper_local.load.schedule import Phase, Shape, plan_arrivals
from tests.support.guards import GUARD_S

FIS = "inferenceservices.fleetkeeper.io"
ONE_TRY = Patience(attempts=1, request_timeout_s=300.0, connect_timeout_s=120.0)
"""A client that hides nothing: any refusal or break is a failed request. A busy machine connects late."""
CONTROL_PORT = 9090
SCALE_DOWN_DELAY_S = 30
"""Of the shared fleet: the shortest that the schema allows."""


def tiny(**spec: Any) -> Live:
    """examples/tiny.yaml with sections of its spec merged."""
    manifest: Live = yaml.safe_load(TINY.read_text())
    for name, value in spec.items():
        old = manifest["spec"].get(name)
        manifest["spec"][name] = {**old, **value} if isinstance(old, dict) else value
    return manifest


def complete(
    base_url: str,
    model: str,
    *,
    prompt: str = "The queue",
    tokens: int = 8,
    logprobs: int | None = None,
    **headers: str,
) -> Live:
    """One completion, not streamed.

    Raises:
        urllib.error.HTTPError: the answer is not 200.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    if logprobs is not None:
        body["logprobs"] = logprobs
    request = urllib.request.Request(
        f"{base_url}/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
        found: Live = json.load(answer)
    return found


def simulated(**spec: Any) -> Live:
    """The same service on simulated engines, which leave the node to a real vLLM."""
    resources = {"cpu": "20m", "memory": "512Mi", "sharedMemory": "64Mi"}
    return tiny(**{"engine": {"profile": "simulated"}, "resources": resources, **spec})


@contextmanager
def service_fleet(product: Installation, manifest: Live) -> Iterator[Fleet]:
    """A service in a namespace of its own, with one replica behind a router that keeps sessions.

    The block awaits it: what its pods need may be put into the namespace first.
    """
    tenant = f"tenant-{uuid.uuid4().hex[:6]}"
    ensure_namespace(product.cluster, tenant)
    fleet = Fleet(product.cluster, tenant, manifest["metadata"]["name"])
    fleet.said = say
    spec = manifest["spec"]
    spec["replicas"] = 1
    spec["routing"] |= {"policy": "SessionAffinity"}
    spec["scaling"] |= {"maxReplicas": 2, "scaleDownDelaySeconds": SCALE_DOWN_DELAY_S}
    fleet.kubectl("apply", "-f", "-", given=json.dumps(manifest))
    try:
        yield fleet
    finally:
        product.cluster.kubectl("delete", "namespace", tenant, "--wait=false", "--ignore-not-found")


def ask(fleet: Fleet, prompt: str, tokens: int) -> None:
    """Complete a prompt and drop the answer."""
    try:
        complete(fleet.base_url(), fleet.name, prompt=prompt, tokens=tokens)
    except urllib.error.HTTPError as error:
        error.add_note(error.read().decode(errors="replace"))
        raise


def route(fleet: Fleet, routing: dict[str, str]) -> None:
    """Change the routing, and return when only routers with it are left."""
    old = {pod.uid for pod in fleet.pods("router")}
    fleet.change({"routing": routing})
    fleet.until(
        lambda: (
            all(pod.ready and pod.uid not in old for pod in fleet.pods("router"))
            and fleet.is_ready()
        ),
        "routers with the new policy",
    )


def ordered(fleet: Fleet, replicas: int) -> Fleet:
    """The fleet with so many replicas, Ready, by an order through the scale subresource."""
    if "replicas" not in fleet.live()["spec"]:
        fleet.change({"replicas": replicas})  # the subresource cannot make the field
    fleet.kubectl("scale", f"{FIS}/{fleet.name}", f"--replicas={replicas}")
    fleet.await_ready(replicas)
    return fleet


def identities(*fleets: Fleet) -> list[tuple[str, int, str]]:
    """All pods, in which nothing may restart."""
    return [pod.identity for fleet in fleets for pod in [*fleet.engines(), *fleet.pods("router")]]


def gateway_pods(installation: Installation, component: str = "gateway") -> list[PodFacts]:
    """All pods of a component of the gateway, oldest first: gateway, gateway-usage or gateway-redis."""
    selector = f"app.kubernetes.io/name=fleetkeeper,app.kubernetes.io/component={component}"
    return [pod_facts(pod) for pod in installation.cluster.pods(installation.namespace, selector)]


def kill_processes(pod: PodFacts, wanted: Callable[[str], bool]) -> None:
    """Send SIGKILL to the processes of a pod whose command line is `wanted`."""
    pids = processes_of(pod.uid, wanted)
    assert pids, f"{pod.name} has no such process"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def await_measured(fleet: Fleet) -> None:
    """Returns when the control loop knows its pods by Prometheus: they were ready for a minute."""
    fleet.until(
        lambda: (
            fleet.condition("MetricsAvailable").get("status") == "True"
            and fleet.status()["breaker"]["source"] == "Closed"
        ),
        "metrics by Prometheus",
    )


def says(fleet: Fleet, words: str, reason: str | None = None) -> bool:
    """Whether an event of the service holds these words (and has this reason)."""
    return any(
        words in str(event.get("message")) and reason in (None, event.get("reason"))
        for event in fleet.cluster.events(fleet.namespace, fleet.name)
    )


MIXED = Shape(prompt_tokens=(8, 24), output_tokens=(8, 24))
"""Short answers of all tiers."""
HEAVY = Shape(
    tiers={"realtime": 0.1, "standard": 0.6, "batch": 0.3},
    prompt_tokens=(8, 24),
    output_tokens=(16, 32),
)
"""Longer answers, hardly any realtime: what is too much of it may be refused."""


def steady(
    fleet: Fleet, rate_per_s: float, *, seed: int, shape: Shape = MIXED, seconds: float = 3600.0
) -> Traffic:
    """Load at a steady rate, by a client that tries once."""
    arrivals = plan_arrivals([Phase("steady", seconds, rate_per_s)], shape, seed)
    return Traffic(fleet.base_url(), fleet.name, arrivals, ONE_TRY)


def failures(samples: Sequence[Sample]) -> list[str]:
    """What went wrong, each with its time.

    A busy machine may close tiers: 429 to standard and batch is an answer, to realtime never.
    """
    return [
        f"{sample.sent_s:.1f} s, {sample.arrival.tier}: {sample.outcome.cause} {sample.outcome.detail[:200]}"
        for sample in samples
        if not sample.outcome.ok
        and (sample.outcome.status != 429 or sample.arrival.tier == "realtime")
    ]


def metrics(pod: PodFacts, port: int = CONTROL_PORT) -> dict[str, float]:
    """The samples of a pod by `name{labels}`; without a port, those of an engine."""
    address = f"http://{pod.ip}:{port}/metrics"
    with urllib.request.urlopen(address, timeout=300) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def requests_served(fleet: Fleet) -> dict[str, float]:
    """Admitted requests by engine pod."""
    return {
        pod.name: sum(
            value
            for name, value in metrics(pod).items()
            if name.startswith("fleetkeeper_requests_total{") and 'outcome="admitted"' in name
        )
        for pod in fleet.engines()
    }


def await_routed(fleet: Fleet) -> None:
    """Return when the router sends requests to every replica: it learns of a new one after Kubernetes."""
    url, before = fleet.base_url(), requests_served(fleet)

    def are_all_used() -> bool:
        session = {"X-Session-ID": uuid.uuid4().hex}
        complete(url, fleet.name, tokens=1, logprobs=None, **session)
        return all(count > before.get(name, 0) for name, count in requests_served(fleet).items())

    fleet.until(are_all_used, "requests at every replica")


def limits(pod: PodFacts) -> dict[str, tuple[int, int]]:
    """Sequences and tokens of a step at an engine: wanted, effective, floor, ceiling."""
    seen = metrics(pod)
    return {
        kind: (
            int(seen[f'fleetkeeper_limit_sequences{{kind="{kind}"}}']),
            int(seen[f'fleetkeeper_limit_tokens{{kind="{kind}"}}']),
        )
        for kind in ("wanted", "effective", "floor", "ceiling")
    }


def await_operators(installation: Installation) -> None:
    """Returns when all operator pods are ready and one of them leads."""
    _await(installation, lambda: all(pod.ready for pod in map(pod_facts, installation.operators())))
    await_leader(installation)


def await_leader(installation: Installation) -> None:
    """Returns when the Lease is renewed: every two seconds while somebody leads."""
    before = _lease_renewed(installation)
    _await(installation, lambda: _lease_renewed(installation) != before)


def _await(installation: Installation, question: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_S
    while not question():
        assert time.monotonic() < deadline, installation.describe()
        time.sleep(0.3)


def _lease_renewed(installation: Installation) -> str:
    return installation.cluster.kubectl(
        *("-n", installation.namespace, "get", "lease", installation.release, "-o"),
        "jsonpath={.spec.renewTime}",
    )


_OF_A_BUSY_MACHINE: Final = re.compile(
    r"leader lease lost$|Request attempt #\d+/\d+ failed; will retry"
)


def tracebacks(log: str) -> list[str]:
    """Lines of the operator's log that tell of a mistake of ours.

    A busy machine makes none: an API server that answers late is asked again, and costs a leader its lease.
    """
    found = []
    for line in filter(None, log.splitlines()):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            found.append(line)
            continue
        is_error = entry.get("level") in {"error", "critical"} or "exception" in entry
        if is_error and not _OF_A_BUSY_MACHINE.match(str(entry.get("event"))):
            found.append(line)
    return found


def in_container(fleet: Fleet, pod: PodFacts, script: str) -> subprocess.Popen[str]:
    """Starts a Python script beside the engine, in its container."""
    argv = fleet.cluster.argv("-n", fleet.namespace, "exec", pod.name, "-c", "engine", "--")
    return subprocess.Popen(
        [*argv, "python3", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
