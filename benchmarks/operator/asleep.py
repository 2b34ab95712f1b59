"""Measure the operator at rest with N services that sleep, then with the same services awake.

Usage: asleep.py [--n 1000] [--rest 300]

It starts a control plane of its own and creates N services with `status.sleep.state: Asleep`. Then it starts
`fleetkeeper run` with its default settings, and watches it once all services are Ready and nothing was
written for a while. A wake mark for each service then starts N replicas on fake nodes, half of whose engines
answer, and the same process is watched again. Writes and reads are those of the API server's audit log,
without the lease.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from fleetkeeper.adapters.keys import new_control_keys, new_grant_keys  # noqa: E402 -- on the path set above
from fleetkeeper.adapters.kubernetes.resources import CHILDREN, INFERENCE_SERVICE  # noqa: E402
from fleetkeeper.reconcile.types import Kind  # noqa: E402
from fleetkeeper_contract.sleep import GATEWAY_KEY, GATEWAY_VALUE, SleepState  # noqa: E402
from fleetkeeper_local.control_plane.control_plane import ControlPlane  # noqa: E402
from tests.support.autoscale.idle_engines import add_nodes, half_answer  # noqa: E402
from tests.support.operators.operator_process import STOCK, OperatorProcess  # noqa: E402
from tests.support.operators.operator_world import World, is_ready, operator_world, service  # noqa: E402

GPUS_A_NODE = 8
CREATES_AT_ONCE = 16
QUIET_S = 30.0
TIMEOUT_S = 1800.0
MARKS = "fleetkeeper-wake-marks"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1000, help="number of services")
    parser.add_argument("--rest", type=float, default=300, help="seconds to watch each state")
    args = parser.parse_args()
    nodes = -(-args.n // GPUS_A_NODE)
    with ControlPlane() as plane, half_answer(nodes):
        add_nodes(plane, nodes, gpus=GPUS_A_NODE)
        print("| services | watched for | writes | reads | share of a core | RSS |")
        print("| --- | --- | --- | --- | --- | --- |")
        asyncio.run(_measure(plane, args.n, args.rest))


async def _measure(plane: ControlPlane, count: int, rest_s: float) -> None:
    names = [f"s{number:04d}" for number in range(count)]
    async with operator_world(plane, "bench") as world:
        gate = asyncio.Semaphore(CREATES_AT_ONCE)
        await asyncio.gather(*(_create_asleep(world, gate, name) for name in names))
        operator = await _operator(world)
        await world.until("asleep", lambda: all(map(is_ready, map(world.fis, names))), TIMEOUT_S)
        await world.patch(CHILDREN[Kind.CONFIG_MAP], MARKS, {"data": {GATEWAY_KEY: GATEWAY_VALUE}})
        await _at_rest("asleep", world, operator, rest_s)
        uids = [(world.fis(name) or {})["metadata"]["uid"] for name in names]
        marks = {"data": dict.fromkeys(uids, "1.standard")}
        await world.patch(CHILDREN[Kind.CONFIG_MAP], MARKS, marks)
        await world.until("awake", lambda: all(_is_awake(world, name) for name in names), TIMEOUT_S)
        await _at_rest("awake", world, operator, rest_s)


async def _create_asleep(world: World, gate: asyncio.Semaphore, name: str) -> None:
    sleep = {"number": 1, "state": SleepState.ASLEEP.value, "since": "2026-01-01T00:00:00Z"}
    async with gate:
        await world.create(service(name, access="Gateway", scaling={"sleep": {}}))
        await world.client.request(
            "PATCH",
            INFERENCE_SERVICE.path(world.namespace, name, "status"),
            body={"status": {"sleep": sleep}},
            content_type="application/merge-patch+json",
            timeout_s=30,
        )


async def _operator(world: World) -> OperatorProcess:
    files = new_control_keys().files()
    grants = world.directory / "grant-jwks.json"
    grants.write_text(new_grant_keys()["jwks.json"])
    for file, text in files.items():
        (world.directory / file).write_text(text)
    env = {
        "FLEETKEEPER_WAKE_MARKS": MARKS,
        "FLEETKEEPER_GRANT_JWKS_FILE": str(grants),
        "FLEETKEEPER_CONTROL_KEY_FILE": str(world.directory / "key.pem"),
        "FLEETKEEPER_CONTROL_JWKS_FILE": str(world.directory / "jwks.json"),
        "FLEETKEEPER_CONTROL_ENABLED": "true",
        "FLEETKEEPER_DIRECT_READS": "true",
        "FLEETKEEPER_LOG_LEVEL": "warning",
    }
    return await world.operator(env=env, waits=None, command=STOCK).start().leads()


def _is_awake(world: World, name: str) -> bool:
    status = (world.fis(name) or {}).get("status") or {}
    return "state" not in status.get("sleep", {}) and status.get("readyReplicas") == 1


async def _at_rest(state: str, world: World, operator: OperatorProcess, rest_s: float) -> None:
    """Wait for a time without a write, and print what the operator does from then on."""
    while True:
        since = world.mark()
        await asyncio.sleep(QUIET_S)
        if not world.writes(since, events=True):
            break
    since, ticks, began = world.mark(), _ticks(operator), time.monotonic()
    await asyncio.sleep(rest_s)
    share = (_ticks(operator) - ticks) / TICKS_A_SECOND / (time.monotonic() - began)
    found, writes = world.requests(since), len(world.writes(since, events=True))
    print(
        f"| {state} | {rest_s:g} s | {writes} | {len(found) - writes} | {share:.1%} "
        f"| {_rss_mib(operator)} MiB |",
        flush=True,
    )


def _ticks(operator: OperatorProcess) -> int:
    fields = _proc(operator, "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _rss_mib(operator: OperatorProcess) -> int:
    line = next(row for row in _proc(operator, "status").splitlines() if row.startswith("VmRSS:"))
    return round(int(line.split()[1]) / 1024)


def _proc(operator: OperatorProcess, file: str) -> str:
    assert operator.process is not None
    return Path(f"/proc/{operator.process.pid}/{file}").read_text()


if __name__ == "__main__":
    main()
