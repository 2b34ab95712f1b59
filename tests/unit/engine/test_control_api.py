"""The control port and the exposition, on a region that the test writes itself."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from fleetkeeper_contract.histogram_buckets import BATCH_TIME_EDGES_S
from fleetkeeper_engine.devices.interface import DeviceMemory
from fleetkeeper_engine.shm.layout import CapBlock, HeartbeatBlock, MiddlewareBlock, SchedulerBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.control_api import server
from fleetkeeper_engine.supervisor.control_api.auth import Verifier, read_keys
from fleetkeeper_engine.supervisor.control_api.metric_table import METRICS
from fleetkeeper_engine.supervisor.control_api.server import ControlPort
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.state import PodState
from tests.support.engine.signer import ISSUER, Signer

POD = "pod-uid-of-a-test"


class Bench:
    """A control port over a region; `pod` is the supervisor's side, `region` everybody's."""

    def __init__(self, directory: Path, accelerator: str = "cpu") -> None:
        document = parse_document(
            json.dumps(
                {
                    "contract": 1,
                    "accelerator": accelerator,
                    "model": {"source": "/m", "servedName": "m"},
                    "batching": {"maxSequences": 64, "maxTokens": 2048},
                }
            )
        )
        self.pod = PodState(document, Region.create(directory / "region"), MemoryState(0.8))
        self.region = self.pod.region
        self.signer = Signer(directory / "keys")
        verifier = Verifier(POD, ISSUER)
        verifier.trust(read_keys(self.signer.directory))
        self.engine_text: bytes | None = b"# TYPE vllm:x gauge\nvllm:x 1.0\n"
        self.port = ControlPort(self.pod, verifier, self.scrape)
        self.client = TestClient(TestServer(self.port.app()))

    async def scrape(self) -> bytes | None:
        return self.engine_text

    async def put(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        request = {"sequences": 16, "tokens": 512, "leaseSeconds": 60, "generation": 1, **changes}
        headers = {"Authorization": f"Bearer {self.signer.token(POD)}"}
        async with self.client.put("/v1/limits", json=request, headers=headers) as response:
            return response.status, await response.json()

    async def status(self, path: str) -> tuple[int, str]:
        async with self.client.get(path) as response:
            return response.status, await response.text()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    async with found.client:
        yield found


RUNNING = SchedulerBlock(
    supported=True,
    limit_sequences=64,
    limit_tokens=2048,
    ceiling_sequences=64,
    ceiling_tokens=2048,
    floor_sequences=4,
    floor_tokens=256,
    running=(0, 20, 0),
    worked_steps=5,
)


async def test_a_limits_request_reaches_shared_memory_and_the_answer_says_what_holds(
    bench: Bench,
) -> None:
    bench.region.write_scheduler(RUNNING)
    status, body = await bench.put(admit={"batch": 0.0}, shares={"batch": 0.1})
    assert status == 200
    assert (body["accepted"], body["applied"], body["idle"]) == (1, 0, False)
    block = bench.region.read_supervisor()
    assert block is not None
    assert (block.generation, block.sequences, block.tokens) == (1, 16, 512)
    assert block.admit == (1.0, 1.0, 0.0)
    assert block.shares == (1.0, 1.0, 0.1)
    assert block.lease_deadline == pytest.approx(time.monotonic() + 60, abs=5)
    bench.region.write_scheduler(replace(RUNNING, generation=1, limit_sequences=16))
    headers = {"Authorization": f"Bearer {bench.signer.token(POD)}"}
    async with bench.client.get("/v1/limits", headers=headers) as response:
        told = await response.json()
    assert (told["applied"], told["effective"]["sequences"]) == (1, 16)
    assert told["draining"] == {"above": 4}, "running above the limit is draining, not failure"


async def test_a_limits_request_is_acknowledged_as_soon_as_the_scheduler_read_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "APPLIED_POLL_S", math.inf)
    bench.region.write_scheduler(replace(RUNNING, generation=1))
    status, body = await bench.put()
    assert (status, body["applied"]) == (200, 1)


async def test_the_ranges_are_the_engines_own_once_it_runs(bench: Bench) -> None:
    bench.region.write_scheduler(replace(RUNNING, ceiling_sequences=32))
    status, body = await bench.put(sequences=33)
    assert (status, body["allowed"]["sequences"]["max"]) == (422, 32)
    assert (await bench.put(sequences=32))[0] == 200


@pytest.mark.promise("unknown-scheduler")
async def test_an_unsupported_scheduler_is_told_as_such(bench: Bench) -> None:
    bench.region.write_scheduler(replace(RUNNING, supported=False))
    _, body = await bench.put()
    assert body["supported"] is False


async def test_limits_requests_need_a_token_health_and_metrics_do_not(bench: Bench) -> None:
    async with bench.client.put("/v1/limits", json={}) as response:
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    async with bench.client.get("/v1/limits") as response:
        assert response.status == 401
    assert (await bench.status("/healthz/live"))[0] == 200
    assert (await bench.status("/metrics"))[0] == 200
    assert (await bench.status("/v1/anything"))[0] == 404


async def test_a_large_body_is_refused(bench: Bench) -> None:
    headers = {"Authorization": f"Bearer {bench.signer.token(POD)}"}
    async with bench.client.put("/v1/limits", data=b"x" * 20_000, headers=headers) as response:
        assert response.status == 413


async def test_ready_names_what_is_missing(bench: Bench) -> None:
    assert await bench.status("/healthz/startup") == (503, "no token was generated yet\n")
    bench.pod.started = bench.pod.child_alive = True
    assert await bench.status("/healthz/ready") == (200, "ok\n")
    bench.pod.draining = True
    assert await bench.status("/healthz/ready") == (503, "draining\n")


async def test_a_cuda_pod_is_not_ready_before_every_rank_armed_its_cap(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "cuda")
    bench.pod.started = bench.pod.child_alive = True
    async with bench.client:
        status, text = await bench.status("/healthz/ready")
        assert (status, "cap is not armed" in text) == (503, True)
        bench.region.write_cap(0, CapBlock(total_bytes=2**30, non_torch_bytes=2**29))
        _, text = await bench.status("/healthz/ready")
        assert "0.50 GiB of 1.00 GiB are in use" in text
        assert "other processes on device 0 count, because NVML does not list this one" in text
        cap = CapBlock(armed=True, reserved_bytes=100, allocated_bytes=75, written=time.monotonic())
        bench.region.write_cap(0, cap)
        assert (await bench.status("/healthz/ready"))[0] == 200
        _, text = await bench.status("/metrics")
        assert "fleetkeeper_memory_fragmentation_ratio 0.25" in text
        bench.region.write_cap(0, replace(cap, written=time.monotonic() - 6))
        _, text = await bench.status("/metrics")
        assert "fleetkeeper_memory_fragmentation_ratio" not in text, "its reporter has ended"


@pytest.mark.parametrize(
    ("reserved", "allocated", "ratio"),
    [(100, 75, 0.25), (100, 100, 0.0), (90, 100, 0.0), (0, 0, 0)],
)
def test_fragmentation_is_never_negative(reserved: int, allocated: int, ratio: float) -> None:
    """The allocator may give memory back between the two readings; a negative metric would spoil its sample."""
    block = CapBlock(reserved_bytes=reserved, allocated_bytes=allocated)
    assert block.fragmentation_ratio == ratio


@pytest.mark.promise("neighbor-memory")
async def test_over_the_cap_shared_memory_says_stop(bench: Bench) -> None:
    for second in range(12):
        changed = bench.pod.observe_memory(DeviceMemory(90, 100), float(second))
        assert changed == (second == 10)
    block = bench.region.read_supervisor()
    assert block is not None
    assert block.cap_exceeded
    assert bench.pod.observe_memory(DeviceMemory(70, 100), 12.0)
    block = bench.region.read_supervisor()
    assert block is not None
    assert not block.cap_exceeded


async def test_an_engine_that_goes_on_without_our_code_shows_no_counters_of_it(
    bench: Bench,
) -> None:
    """Standing still beside requests that wait they would be a hang to the operator; absent they are missing."""
    bench.region.write_scheduler(replace(RUNNING, supported=False, instrumentation_disabled=True))
    bench.region.write_middleware(MiddlewareBlock(waiting=(1, 2, 3), arrivals=(4, 5, 6)))
    _, text = await bench.status("/metrics")
    shown = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[:1] != "#"}
    assert "fleetkeeper_live_limits_supported 0" in text
    assert "fleetkeeper_arrivals_total" in shown
    assert not shown & {"fleetkeeper_steps_total", "fleetkeeper_running", "fleetkeeper_waiting"}


async def test_everything_in_the_table_is_exported_with_its_type_and_labels(bench: Bench) -> None:
    """The table is the contract: names, types, labels and bucket edges, nothing more and nothing less."""
    edges = len(BATCH_TIME_EDGES_S) + 1
    bench.region.write_scheduler(
        replace(RUNNING, batch_time_buckets=(1,) * edges, batch_time_sum=12.5)
    )
    bench.region.write_heartbeat(HeartbeatBlock(schedule_calls=5))
    bench.region.write_middleware(MiddlewareBlock(waiting=(1, 2, 3), arrivals=(4, 5, 6)))
    bench.region.write_cap(
        0,
        CapBlock(armed=True, reserved_bytes=100, allocated_bytes=75, written=time.monotonic()),
    )
    bench.pod.observe_memory(DeviceMemory(60, 100), time.monotonic())
    _, text = await bench.status("/metrics")
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert "vllm:x" in families, "vLLM's own metrics follow"
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.type, metric.name
        assert family.documentation == metric.help
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), metric.name
    assert set(families) == {"vllm:x"}
    told = {
        (s.name, tuple(s.labels.values())): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }
    assert told["fleetkeeper_batch_time_seconds_count", ()] == edges
    assert told["fleetkeeper_batch_time_seconds_bucket", ("0.001",)] == 1
    assert told["fleetkeeper_batch_time_seconds_sum", ()] == 12.5
    assert told["fleetkeeper_waiting", ("batch",)] == 3
    assert told["fleetkeeper_memory_used_ratio", ()] == 0.6


async def test_metrics_come_although_vllm_does_not_answer(bench: Bench) -> None:
    bench.engine_text = None
    status, text = await bench.status("/metrics")
    assert (status, "fleetkeeper_engine_metrics_up 0.0" in text) == (200, True)
    assert "fleetkeeper_steps_total" not in text, "what is unknown is absent, never 0"
