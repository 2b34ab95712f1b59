"""Let 25 services share four accelerators of the local node: does each get its turn, and is a busy one spared?

    .venv/bin/python benchmarks/simulated/pool.py [--services 25] [--accelerators 4] [--minutes 30]

It needs root, and no other node on the machine. Operator, Prometheus, gateway, routers and engine pods are
real; only vLLM is simulated, and the node's accelerators are an extended resource without a device. Requests
come by Poisson arrivals, and the model of each is drawn by Zipf's law. A client whose request gets 503 sends it
again after `Retry-After`, for `PATIENCE_S` at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results_page import markdown_table, measured_on, write_section  # noqa: E402
from sleep import TENANT, TITLE, Replicas, desired_service, spread  # noqa: E402

from fleetkeeper.autoscale.constants import EARLY_IDLE_S  # noqa: E402
from fleetkeeper_local.common.paths import data_dir  # noqa: E402
from fleetkeeper_local.common.report import say  # noqa: E402
from fleetkeeper_local.demo.cluster import Cluster  # noqa: E402
from fleetkeeper_local.demo.front_door import FrontDoor  # noqa: E402
from fleetkeeper_local.demo.installation import (  # noqa: E402
    GATEWAY,
    NAMESPACE,
    SIMULATED_PROFILE,
    Installation,
    desired_values,
    ensure_namespace,
    push_images,
)
from fleetkeeper_local.demo.scenario import EngineKind  # noqa: E402
from fleetkeeper_local.demo.stage import LocalStage  # noqa: E402
from fleetkeeper_local.node.flags import read_settings  # noqa: E402
from fleetkeeper_local.node.node import Node  # noqa: E402

HEADING = "25 services on four accelerators"
RESOURCE = "nvidia.com/gpu"
IDLE_S, AWAKE_S = 60, 30
"""The fields of `scaling.sleep`."""
PATIENCE_S = 300.0
AT_ONCE_S = 1.0
"""An answer that began within this time was not held."""
SEED = 37


@dataclass
class Asked:
    """A request with all its tries; times are seconds since the epoch."""

    service: str
    sent: float
    tries: int = 0
    began: float | None = None
    """Time of the head of the answer. None: the client gave up."""
    ended: float = 0.0
    refusals: list[str] = field(default_factory=list)
    """Status and code of each try that failed."""

    @property
    def waited_s(self) -> float:
        """Return the seconds until the answer began, or until the client gave up."""
        return (self.began or self.ended) - self.sent


class Clients:
    """Clients that send a refused request again after `Retry-After`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url = session, url
        self._headers = {"Authorization": f"Bearer {key}"}
        self.asked: list[Asked] = []

    async def ask(self, service: str) -> None:
        """Send one request until it is answered or the client's patience ends."""
        asked = Asked(service, time.time())
        self.asked.append(asked)
        while True:
            again_s = await self._try(asked)
            asked.ended = time.time()
            if again_s is None or asked.ended + again_s > asked.sent + PATIENCE_S:
                return
            await asyncio.sleep(again_s)

    async def _try(self, asked: Asked) -> float | None:
        """Send the request once. Return after how many seconds to send it again, None at its end."""
        body = {"model": asked.service, "prompt": "The queue", "max_tokens": 8, "stream": True}
        asked.tries += 1
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, headers=self._headers
            ) as answer:
                began, text = time.time(), await answer.text()
                if answer.status == 200:
                    asked.began = began
                    return None
                asked.refusals.append(f"{answer.status} {json.loads(text)['error']['code']}")
                return float(answer.headers.get("Retry-After", 1)) if answer.status == 503 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            asked.refusals.append(type(error).__name__)
            return None


async def load(clients: Clients, names: list[str], gap_s: float, seconds: float) -> None:
    """Send the requests, and return when each has ended."""
    source, end = random.Random(SEED), time.monotonic() + seconds
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    async with asyncio.TaskGroup() as requests:
        while True:
            await asyncio.sleep(source.expovariate(1 / gap_s))
            if time.monotonic() > end:
                return
            requests.create_task(clients.ask(*source.choices(names, weights)))


async def until_settled(cluster: Cluster) -> None:
    """Wait until each new service had its first start, or sleeps because it found no room for it.

    Raises:
        TimeoutError: not after ten minutes; the text names the services.
    """
    end = time.monotonic() + 600
    while open_ones := [
        item["metadata"]["name"]
        for item in json.loads(cluster.kubectl("-n", TENANT, "get", "fis", "-o=json"))["items"]
        if not _is_ready(item)
    ]:
        if time.monotonic() > end:
            raise TimeoutError(f"not Ready after ten minutes: {', '.join(open_ones)}")
        await asyncio.sleep(5.0)


def _is_ready(service: dict[str, Any]) -> bool:
    conditions = service.get("status", {}).get("conditions", ())
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


async def play(
    cluster: Cluster, url: str, key: str, names: list[str], *, gap_s: float, seconds: float
) -> list[str]:
    """Send the requests, and return the parts of the report."""
    replicas = Replicas()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        watching = asyncio.create_task(replicas.watch(cluster))
        try:
            say("waiting until each service has started, or found no accelerator")
            await until_settled(cluster)
            say(f"sending requests for {seconds / 60:.0f} minutes")
            clients = Clients(session, url, key)
            began = time.time()
            await load(clients, names, gap_s, seconds)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    engines = {name: replicas.changes[name] for name in names}  # without those of routers
    return report(clients.asked, Replicas(engines), began, early_sleeps(cluster))


def early_sleeps(cluster: Cluster) -> int:
    """Return how often a service went to sleep because another one needed its accelerators."""
    found = json.loads(
        cluster.kubectl("-n", TENANT, "get", "events", "--field-selector=reason=Asleep", "-o=json")
    )
    return sum(
        (event.get("series") or event).get("count") or 1
        for event in found["items"]
        if "needed its accelerators" in event["message"]
    )


def report(asked: list[Asked], replicas: Replicas, began: float, early: int) -> list[str]:
    """Return a sentence on the services, and a table of the requests."""
    sleeps = [
        (name, at)
        for name, changes in replicas.changes.items()
        for at, count in changes
        if count == 0 and at > began
    ]
    busy = sum(_was_busy(asked, name, at) for name, at in sleeps)
    wakes = sum(at > began for name in replicas.changes for at in replicas.wakes(name))
    turns = [
        turn
        for name in replicas.changes
        for at in replicas.wakes(name)
        if (turn := waited_for_turn(asked, name, at)) is not None
    ]
    answered = [item for item in asked if item.began is not None]
    kinds = Counter(_kind(item) for item in asked)
    others = Counter(
        refusal
        for item in asked
        for refusal in item.refusals
        if not refusal.startswith("503 service_waking")
    )
    rows = [
        [title, f"{kinds[title]} ({kinds[title] / len(asked):.1%})"]
        for title in ("at once", "after a hold", "after a retry", "given up")
    ]
    rows += [
        [
            "wait of what was not answered at once",
            spread([i.waited_s for i in asked if _kind(i) != "at once"]),
        ],
        ["longest wait", f"{max(item.waited_s for item in asked):.0f} s"],
        ["from a service's first waiting request to its replica", spread(turns)],
        ["longest of them", f"{max(turns):.0f} s"],
        ["answered", f"{len(answered)} of {len(asked)}"],
        [
            "refusals but `service_waking`",
            ", ".join(f"{n} x {code}" for code, n in others.items()) or "none",
        ],
    ]
    return [
        (
            f"{wakes} wakes, and {len(sleeps)} sleeps, {early} of them for another service. {busy} services slept within {EARLY_IDLE_S:.0f} s after a request. "
            f"At most {peak_replicas(replicas)} replicas were ordered at once."
        ),
        markdown_table(["requests", f"of {len(asked)}"], rows),
    ]


def waited_for_turn(asked: list[Asked], name: str, woke: float) -> float | None:
    """Return how long a service's first waiting request had waited when its replica was ordered."""
    waiting = [
        item.sent
        for item in asked
        if item.service == name and item.sent <= woke <= (item.began or item.ended)
    ]
    return woke - min(waiting) if waiting else None


def peak_replicas(replicas: Replicas) -> int:
    """Return the largest number of replicas that all services together had."""
    changes = sorted((at, name, n) for name, seen in replicas.changes.items() for at, n in seen)
    present: dict[str, int] = {}
    peak = 0
    for _, name, count in changes:
        present[name] = count
        peak = max(peak, sum(present.values()))
    return peak


def _was_busy(asked: list[Asked], name: str, at: float) -> bool:
    """Return whether a request was answered when its service slept, or shortly before."""
    return any(
        item.service == name
        and item.began is not None
        and item.began < at < item.ended + EARLY_IDLE_S
        for item in asked
    )


def _kind(item: Asked) -> str:
    if item.began is None:
        return "given up"
    if item.tries > 1:
        return "after a retry"
    return "at once" if item.waited_s < AT_ONCE_S else "after a hold"


def desired_pool_service(name: str) -> dict[str, Any]:
    """Return a service of the pool."""
    manifest = desired_service(name)
    manifest["spec"]["scaling"] = {
        "sleep": {"afterIdleSeconds": IDLE_S, "minAwakeSeconds": AWAKE_S}
    }
    return manifest


def install(stage: LocalStage, accelerators: int) -> None:
    """Install Fleetkeeper with a budget, and give the node as many accelerators as it has."""
    patch = {"status": {"capacity": {RESOURCE: str(accelerators)}}}
    node = stage.node.settings.node_name
    stage.cluster.kubectl("patch", "node", node, "--subresource=status", "-p", json.dumps(patch))
    say("building and pushing the images (unchanged ones take a second)")
    values = desired_values(push_images(stage.node, [EngineKind.SIMULATED]), stage.node)
    values["accelerators"] = {"max": accelerators}
    values["engineProfiles"][SIMULATED_PROFILE]["resources"] = {"acceleratorResource": RESOURCE}
    Installation(stage.cluster, values).install()


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--services", type=int, default=25)
    parser.add_argument("--accelerators", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--gap", type=float, default=24.0, help="mean seconds between two requests to any service"
    )
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    args = parser.parse_args()
    stage = LocalStage(Node(read_settings(data_dir())))
    install(stage, args.accelerators)
    stage.cluster.kubectl("delete", "namespace", TENANT, "--ignore-not-found")
    ensure_namespace(stage.cluster, TENANT)
    names = [f"model-{number:02}" for number in range(args.services)]
    stage.cluster.apply(*(desired_pool_service(name) for name in names), namespace=TENANT)
    with stage.reach(NAMESPACE, GATEWAY) as url:
        key = FrontDoor(stage.cluster, url, NAMESPACE).create_key("pool", TENANT)
        found = asyncio.run(
            play(
                stage.cluster,
                url,
                key,
                names,
                gap_s=args.gap,
                seconds=args.minutes * 60,
            )
        )
    text = (
        f"{args.services} services with `afterIdleSeconds: {IDLE_S}` and `minAwakeSeconds: {AWAKE_S}` share a budget of {args.accelerators} accelerators, and the node "
        f"has no more. A request every {args.gap:.0f} s for {args.minutes:.0f} minutes, the most popular service gets a quarter of them. A client whose request gets 503 "
        f"sends it again after `Retry-After`, for {PATIENCE_S:.0f} s. Median (P95)."
    )
    section = "\n\n".join(["    .venv/bin/python benchmarks/simulated/pool.py", text, *found, measured_on()])  # fmt: skip
    if args.write:
        write_section(HEADING, section, HERE / "RESULTS.md", TITLE)
    print(section)


if __name__ == "__main__":
    main()
