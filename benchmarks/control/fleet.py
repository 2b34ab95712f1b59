"""The control loop over a fleet, with a real Prometheus that scrapes modelled engines.

    python benchmarks/control/fleet.py [--services 1000] [--pods 2] [--ticks 12]

Three processes: modelled engines that serve their metrics (this file with --serve), Prometheus, and
this one, which runs the operator's own control loop with its own Prometheus client. Services and
pods are records in the operator's cache. Engines accept every limits request at once. Reconciles
are counted, not run. The output has time and CPU of a tick, queries, CPU share of a core, and event
loop lag.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from fleetkeeper.adapters.kubernetes.records import Seen
from fleetkeeper.adapters.prometheus import Prometheus, PrometheusSettings
from fleetkeeper.autoscale.rules.removal import Removal
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.signals.series_map import PLACES
from fleetkeeper.autoscale.types import LimitsRequest, PodView, PutOutcome
from fleetkeeper.common.values import Event
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.types import Kind, Pod, Workload
from fleetkeeper.runtime import heap
from fleetkeeper.runtime.autoscaler.loop import ControlLoop
from fleetkeeper.runtime.autoscaler.metrics import ControlMetrics
from fleetkeeper.runtime.autoscaler.sources import MeasuredSource
from fleetkeeper.runtime.defects import Defects
from fleetkeeper.runtime.queue import Key, KeyedQueue
from fleetkeeper.runtime.state.cache import Cache
from fleetkeeper.runtime.state.gpu_ledger import GpuLedger
from fleetkeeper.runtime.telemetry.metrics import OperatorMetrics
from fleetkeeper.simulate.engine import H100_8B, Engine
from fleetkeeper.simulate.requests import Request
from fleetkeeper_contract.step_terms import StepSums
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.programs import program_path

SHARDS = 20
"""Scrape targets; each serves the pods of a twentieth of the services, with their labels."""
EDGES_S = (0.005, 0.01, 0.02, 0.03466, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TICK_S = 5.0
WARM_TICKS = 3
LABEL_OF = {"effective": "kind", "applied": "kind", "decode": "step_class", "prefill": "step_class"}
CONFIG = """
global: {scrape_interval: 5s, scrape_timeout: 5s}
scrape_configs:
- job_name: engines
  honor_labels: true
  static_configs: [{targets: [%s]}]
  relabel_configs:
  - {source_labels: [__address__], regex: "([^/]+)(/.*)", target_label: __metrics_path__, replacement: "$2"}
  - {source_labels: [__address__], regex: "([^/]+)(/.*)", target_label: __address__, replacement: "$1"}
"""


def template(sample: PodSample) -> str:
    """Return a pod's exposition, with @ for its own labels and twelve buckets per histogram."""
    records = {
        "counters": sample.counters,
        "gauges": sample.gauges,
        "decode": sample.decode or StepSums(),
        "prefill": sample.prefill or StepSums(),
    }
    lines = []
    for (name, value), (record, index) in PLACES.items():
        number = float(records[record][index])
        own = f',{LABEL_OF.get(value, "tier")}="{value}"' if value else ""
        if name.endswith("_bucket"):
            lines += [f'{name}{{@{own},le="{edge:g}"}} {number}' for edge in EDGES_S]
        else:
            lines.append(f"{name}{{@{own}}} {number}")
    return "\n".join(lines) + "\n"


class Engines:
    """Modelled engines under a steady load; each pod shows one of a few engines."""

    def __init__(self, services: int, pods: int) -> None:
        self.services, self.pods = services, pods
        self.engines = [Engine(H100_8B, f"model-{i}", time.time() - 600) for i in range(8)]
        self.random = Random(1)
        self.last = time.time()
        self.lock = threading.Lock()

    def play(self) -> None:
        """Advance the engines in real time, forever."""
        while True:
            time.sleep(0.25)
            now = time.time()
            with self.lock:
                for engine in self.engines:
                    engine.advance(now)
                    if self.random.random() < 4 * (now - self.last):
                        engine.arrive(Request(now, 1, 800, self.random.randint(50, 300)))
            self.last = now

    def text(self, shard: int) -> bytes:
        """Return the metrics of one target."""
        with self.lock:
            shapes = [template(engine.sample(time.time())) for engine in self.engines]
        return "".join(
            shapes[(number + pod) % len(shapes)].replace(
                "@", f'namespace="team",inference_service="s{number}",pod="s{number}-{pod}"'
            )
            for number in range(shard, self.services, SHARDS)
            for pod in range(self.pods)
        ).encode()


def serve(port: int, services: int, pods: int) -> None:
    """Run the engines' process."""
    engines = Engines(services, pods)
    threading.Thread(target=engines.play, daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = engines.text(int(self.path.rpartition("/")[2]))
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


@contextmanager
def scraped(services: int, pods: int, directory: Path) -> Iterator[str]:
    """Run engines and a Prometheus that scrapes them; yield its URL."""
    port, own = free_ports(2)
    targets = ", ".join(f"'127.0.0.1:{port}/shard/{shard}'" for shard in range(SHARDS))
    config = directory / "prometheus.yaml"
    config.write_text(CONFIG % targets)
    me = [sys.executable, str(Path(__file__)), "--serve", str(port)]
    processes = [
        subprocess.Popen([*me, "--services", str(services), "--pods", str(pods)]),
        subprocess.Popen(
            [
                str(program_path("prometheus")),
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
                "--log.level=error",
            ],
            stderr=subprocess.DEVNULL,
        ),
    ]
    try:
        yield f"http://127.0.0.1:{own}"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def value(url: str, query: str) -> float:
    """Return one number that Prometheus computes; 0 if it has none yet."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?query={query}", timeout=10) as answer:
            rows = json.load(answer)["data"]["result"]
    except OSError:
        return 0.0
    return float(rows[0]["value"][1]) if rows else 0.0


class World:
    """A cache full of services, and engines that accept every limits request."""

    def __init__(self, services: int, pods: int, url: str, deadline_s: float) -> None:
        self.reconciles = self.requests = self.events = 0
        self.queue = KeyedQueue(monotonic=time.monotonic, jitter=lambda s: s)
        self.cache = Cache(now=time.time, changed=lambda _key: None)
        for number in range(services):
            self._add(f"s{number}", pods)
        self.prometheus = Prometheus(PrometheusSettings(url, deadline_s=deadline_s), time.monotonic)
        self.metrics = ControlMetrics(CollectorRegistry())
        context = default_context()
        defects = Defects(
            OperatorMetrics().defects, monotonic=time.monotonic, changed=self.queue.add
        )
        self.loop = ControlLoop(
            cache=self.cache,
            queue=self.queue,
            context=context,
            ledger=GpuLedger(self.cache, context.gpu_budget),
            source=MeasuredSource(
                self.prometheus,
                None,
                may_send=lambda: True,
                monotonic=time.monotonic,
                defects=defects,
            ),
            engines=self,
            replace_pod=self._replace,
            recorder=self,
            metrics=self.metrics,
            defects=defects,
            now=time.time,
            monotonic=time.monotonic,
        )

    @property
    def lost(self) -> int:
        """The number of services whose breaker `source` is open."""
        reports = (self.loop.view(key).control_report for key in self.cache.services())
        return sum(
            report is None or report.breaker is None or report.breaker.source == "Open"
            for report in reports
        )

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> Sequence[PutOutcome]:
        """Accept all requests at once."""
        self.requests += len(requests)
        return [PutOutcome(request.pod, request.generation, True) for request in requests]

    async def reconcile(self) -> None:
        """Count the services that would be reconciled."""
        while (key := await self.queue.get()) is not None:
            self.reconciles += 1
            self.queue.done(key)

    async def _replace(self, key: Key, pod: PodView, removal: Removal) -> bool:
        raise AssertionError(f"{key}: {pod.name} was to be replaced: {removal.why}")

    def record(self, key: Key, event: Event) -> None:
        """Count an event."""
        del key, event
        self.events += 1

    def record_fleet(self, event: Event) -> None:
        """Count an event about the fleet."""
        del event
        self.events += 1

    def _add(self, name: str, pods: int) -> None:
        meta = {
            "namespace": "team",
            "name": name,
            "uid": name,
            "generation": 1,
            "resourceVersion": "1",
        }
        spec = {
            "model": {"source": "pvc://models/llama"},
            "engine": {"profile": "cuda"},
            "resources": {"accelerator": {"resource": "nvidia.com/gpu", "count": 1}},
            "scaling": {"minReplicas": 1, "maxReplicas": 8},
        }
        self.cache.put_service(
            {
                "apiVersion": "fleetkeeper.io/v1alpha1",
                "kind": "InferenceService",
                "metadata": meta,
                "spec": spec,
            }
        )
        engine = Workload(Kind.DEPLOYMENT, name, f"d-{name}", "1", "digest", desired_replicas=pods)
        self.cache.put(Seen("Deployment", "team", name, 1, name, engine))
        now = time.time()
        for number in range(pods):
            pod = Pod(
                name=f"{name}-{number}",
                uid=f"uid-{name}-{number}",
                service=name,
                component="engine",
                revision_uid="r",
                template_hash="t",
                created=now - 3700,
                phase="Running",
                ip="127.0.0.1",
                ready=True,
                ready_since=now - 3600,
                scheduled=True,
            )
            self.cache.put(Seen("Pod", "team", pod.name, 1, name, pod))


async def measure(world: World, ticks: int) -> dict[str, float]:
    """Run ticks of the operator's own loop; return figures without the first three."""
    seconds, cpu, late = [], [], []

    async def lag() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - began - 0.01)

    others = [
        asyncio.create_task(part)
        for part in (world.reconcile(), world.loop.dispatcher.run(), lag())
    ]
    for number in range(ticks + WARM_TICKS):
        if number == WARM_TICKS:
            heap.settle()
            late.clear()
            world.reconciles = world.requests = world.events = 0
            started, spent = time.monotonic(), time.process_time()
        began, used = time.monotonic(), time.process_time()
        await world.loop.tick()
        seconds.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
        await asyncio.sleep(max(0.0, TICK_S - seconds[-1]))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    late.sort()
    return {
        "tick, median s": statistics.median(seconds[WARM_TICKS:]),
        "tick, longest s": max(seconds[WARM_TICKS:]),
        "CPU of a tick, median s": statistics.median(cpu[WARM_TICKS:]),
        "CPU, % of a core": 100 * (time.process_time() - spent) / (time.monotonic() - started),
        "lag of the event loop, p99 ms": 1e3 * late[int(0.99 * len(late))],
        "reconciles per tick": world.reconciles / ticks,
        "services without samples, last tick": world.lost,
        "limits requests per tick": world.requests / ticks,
        "events per tick": world.events / ticks,
    }


async def run(asked: argparse.Namespace) -> dict[str, float]:
    """Run the benchmark once Prometheus knows all pods."""
    heap.reduce_frequency()
    count = asked.services * asked.pods
    with (
        tempfile.TemporaryDirectory() as directory,
        scraped(asked.services, asked.pods, Path(directory)) as url,
    ):
        async with asyncio.timeout(180):
            while value(url, "count(fleetkeeper_steps_total)") < count:  # noqa: ASYNC110 - another process
                await asyncio.sleep(1)
        world = World(asked.services, asked.pods, url, asked.deadline)
        asking = world.prometheus._query  # noqa: SLF001 - only counted
        queries = 0

        def counted(*arguments: Any) -> list[Any]:  # noqa: ANN401 - whatever it takes
            nonlocal queries
            queries += 1
            return asking(*arguments)

        setattr(world.prometheus, "_query", counted)  # noqa: B010 - a method
        found = await measure(world, asked.ticks)
        found["queries per tick"] = queries / (asked.ticks + WARM_TICKS)
        found["series in Prometheus"] = value(url, "prometheus_tsdb_head_series") or value(
            url, 'count({inference_service!=""})'
        )
        world.prometheus.close()
        return found


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=2)
    parser.add_argument("--ticks", type=int, default=12)
    parser.add_argument("--deadline", type=float, default=4.0, help="seconds for a tick's queries")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.services, asked.pods)
    for name, number in asyncio.run(run(asked)).items():
        print(f"| {name} | {number:.3g} |")


if __name__ == "__main__":
    main()
