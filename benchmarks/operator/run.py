"""Measure Fleetkeeper with the harness that measured its peers, on a control plane of its own.

Usage: run.py --measure PATH/measure.py --n 100 [--routing None] [--out FOLDER]

It starts etcd, kube-apiserver, controller-manager, scheduler and kwok. It measures the floor: a
client that creates N Deployments, then one that creates all objects of N services. Then it runs the
harness and prints its figures as a table. The operator runs with its default settings: control and
direct reads are on. Every second pod's engine responds, the others do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from fleetkeeper.adapters.keys import new_control_keys
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.programs import program_path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.autoscale.idle_engines import add_nodes, half_answer  # noqa: E402 -- on the path set above

GPUS_A_NODE = 8
IN_FLIGHT = 16
PLURALS = {"NetworkPolicy": "networkpolicies"}

Manifest = dict[str, Any]


def main() -> None:
    args = _arguments()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    name = f"{args.routing}-{args.n}"
    nodes = -(-args.n * 2 // GPUS_A_NODE)
    for file, text in new_control_keys().files().items():
        (out / file).write_text(text)
    with ControlPlane() as plane, half_answer(nodes):
        add_nodes(plane, nodes, gpus=GPUS_A_NODE)
        operator, harness = _users(plane)
        floors = {} if args.no_floor else asyncio.run(_floors(_access(harness), args))
        command = [
            sys.executable, str(args.measure), "--profile", str(HERE / "profile.json"),
            "--n", str(args.n), "--kubeconfig", str(harness), "--operator-kubeconfig", str(operator),
            "--audit", str(plane.audit_log), "--out", str(out / f"{name}.json"),
            "--log", str(out / f"{name}.log"), "--timeout", str(args.timeout),
            "--settle", str(args.settle), "--rest", str(args.rest),
            "--set", f"operator={args.operator}", "--set", f"port={_free_port()}",
            "--set", f"keys={out.resolve()}", "--set", f"crds={ROOT / 'crds'}", "--set", f"routing={args.routing}",
            *(["--rest-only"] if args.rest_only else []),
            *(["--lock", str(args.lock)] if args.lock else []),
        ]  # fmt: skip
        path = f"{program_path('kubectl').parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    result = json.loads((out / f"{name}.json").read_text())
    result.update(floors)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1))
    print(table(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, required=True, help="the harness, measure.py")
    parser.add_argument("--n", type=int, default=100, help="number of services, at least 50")
    parser.add_argument("--routing", default="None", choices=["None", "LeastLoaded"])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "benchmarks")
    parser.add_argument(
        "--operator",
        default=f"{Path(sys.executable).with_name('fleetkeeper')} run",
        help="command that starts the operator",
    )
    parser.add_argument(
        "--settle", type=float, default=120, help="seconds to wait before measuring at rest"
    )
    parser.add_argument("--rest", type=float, default=120)
    parser.add_argument("--rest-only", action="store_true")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600,
        help="seconds for all objects to exist, and again for all to be ready",
    )
    parser.add_argument(
        "--lock", type=Path, help="lock file, held in busy phases against parallel runs"
    )
    parser.add_argument("--no-floor", action="store_true")
    return parser.parse_args()


def _users(plane: ControlPlane) -> tuple[Path, Path]:
    """Return kubeconfigs of the operator (certificate) and of the harness (which needs a token)."""
    for user in ("--user=operator", "--serviceaccount=kube-system:harness"):
        name = f"bench-{user.rpartition('=')[2].rpartition(':')[2]}"
        plane.kubectl("create", "clusterrolebinding", name, "--clusterrole=cluster-admin", user)
    plane.kubectl("-n", "kube-system", "create", "serviceaccount", "harness")
    return plane.user_kubeconfig("operator"), plane.service_account_kubeconfig(
        "kube-system", "harness"
    )


def _access(kubeconfig: Path) -> tuple[str, str]:
    """Return server and bearer token."""
    config = yaml.safe_load(kubeconfig.read_text())
    return config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]["token"]


async def _floors(access: tuple[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Measure a client without any operator, for bare Deployments and for a service's objects."""

    def bare(number: int) -> list[Manifest]:
        return [_deployment(f"f{number:04d}")]

    rendered = json.dumps(list(yaml.safe_load_all(_rendered(args.routing))))

    def whole(number: int) -> list[Manifest]:
        made: list[Manifest] = json.loads(rendered.replace("placeholder", f"f{number:04d}"))
        return made

    return {
        "floor": await _floor(access, args.n, bare),
        "floor_same_objects": await _floor(access, args.n, whole),
    }


def _rendered(routing: str) -> str:
    """Return what `fleetkeeper render` prints for the harness's service, named `placeholder`."""
    template = (HERE / f"service-{routing}.yaml").read_text()
    service = template.replace("$name", "placeholder").replace("$i", "0")
    command = [
        str(Path(sys.executable).with_name("fleetkeeper")),
        "render",
        "-n",
        "floor",
        "-f",
        "-",
    ]
    return subprocess.run(command, input=service, capture_output=True, text=True, check=True).stdout


async def _floor(
    access: tuple[str, str], count: int, objects: Callable[[int], list[Manifest]]
) -> dict[str, float]:
    """Return the seconds of a client without an operator until all objects exist and are ready.

    It creates the objects of a service in sequence, for `IN_FLIGHT` services at a time.
    """
    server, token = access
    deployments = "/apis/apps/v1/namespaces/floor/deployments"
    slots = asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(
        base_url=server,
        connector=aiohttp.TCPConnector(ssl=False, limit=0),
        headers={"Authorization": f"Bearer {token}"},
    ) as session:
        async with session.post("/api/v1/namespaces", json={"metadata": {"name": "floor"}}):
            began = time.monotonic()

        async def create(number: int) -> None:
            async with slots:
                for manifest in objects(number):
                    async with session.post(_path(manifest), json=manifest) as answer:
                        answer.raise_for_status()

        await asyncio.gather(*(create(number) for number in range(count)))
        created = time.monotonic() - began
        expected = count * sum(item["kind"] == "Deployment" for item in objects(0))
        while True:
            async with session.get(deployments, params={"resourceVersion": "0"}) as answer:
                items = (await answer.json())["items"]
            if sum(item["status"].get("readyReplicas", 0) > 0 for item in items) >= expected:
                break
            await asyncio.sleep(0.25)
        ready = time.monotonic() - began
        async with session.delete("/api/v1/namespaces/floor"):
            pass
        while True:
            async with session.get("/api/v1/namespaces/floor") as answer:
                if answer.status == 404:
                    break
            await asyncio.sleep(0.5)
    return {"created_s": round(created, 2), "ready_s": round(ready, 2)}


def _path(manifest: Manifest) -> str:
    group = manifest["apiVersion"]
    plural = PLURALS.get(manifest["kind"], f"{manifest['kind'].lower()}s")
    return f"/{'apis' if '/' in group else 'api'}/{group}/namespaces/floor/{plural}"


def _deployment(name: str) -> Manifest:
    labels = {"app": name}
    container = {"name": "engine", "image": "example.invalid/engine:1"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(result: dict[str, Any]) -> str:
    """Return the figures of one run as a Markdown table."""
    burst, rest = result["burst"], result["rest"]
    rows = [
        ("floor: created / ready", _pair(result.get("floor"), "created_s", "ready_s", " s")),
        (
            "floor, the same objects without an operator: created / ready",
            _pair(result.get("floor_same_objects"), "created_s", "ready_s", " s"),
        ),
        ("created by the client", f"{burst['create_s']} s"),
        ("all workloads / all ready", f"{burst['children_s']} / {burst['cr_ready_s']} s"),
        ("writes per service until ready, lease included", burst["writes_per_cr"]),
        ("writes until ready", _by(burst)),
        ("CPU until ready", f"{burst['cpu_s']} s"),
        ("writes per minute at rest", f"{rest['writes_per_min']} ({_by(rest)})"),
        ("reads per minute at rest", rest["reads_per_min"]),
        ("RSS at rest", f"{rest['rss_mib']} MiB"),
        ("CPU at rest, share of a core", f"{rest['cpu_pct_of_core']}%"),
    ]
    if "reaction" in result:
        drift, restart = result["drift"], result["restart"]
        rows += [
            ("patch of replicas -> workload, up / down", _pair(result["reaction"], "up_s", "down_s")),
            ("deleted workload restored", _median(result["heal"]["recreated_s"])),
            ("manual edit reverted", ", ".join(f"{k} {v['reverted_s']} s" for k, v in drift.items())),
            ("restart: writes in 60 s", f"{restart['writes']} ({_by(restart)})"),
            ("restart: pods replaced / templates changed",
             f"{restart['pods_replaced']} / {restart['templates_changed']}"),
            ("RSS after the restart", f"{restart['rss_mib']} MiB"),
            ("patch made while the operator was down, applied after the start",
             f"{result['change_while_down']['applied_s_after_start']} s"),
            ("50 services deleted, children gone", f"{result['delete_50']['children_gone_s']} s"),
        ]  # fmt: skip
        rows += [(f"bad input: {case}", _bad(seen)) for case, seen in result["bad"].items()]
    lines = [f"| N = {result['n']} | |", "| --- | --- |"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows])


def _by(counts: dict[str, Any]) -> str:
    reads = ("get ", "list ", "watch ")
    return (
        ", ".join(f"{k} x{v}" for k, v in counts["by"].items() if not k.startswith(reads)) or "none"
    )


def _pair(found: dict[str, Any] | None, first: str, second: str, unit: str = "") -> str:
    if not found:
        return "not measured"
    return f"{_median(found[first])}{unit} / {_median(found[second])}{unit}"


def _median(value: object) -> str:
    if isinstance(value, dict):
        return f"median {value.get('median')} s, max {value.get('max')} s, n {value.get('n')}"
    return str(value)


def _bad(seen: dict[str, Any]) -> str:
    if seen["admission"] != "accepted":
        return f"{seen['admission']}: {seen['message'][:160]}"
    reason = "".join(seen["events"][:1]) or seen["status"]
    return f"accepted; workload {seen['child']}; writes {seen['writes_20s']}; {reason[:160]}"


if __name__ == "__main__":
    main()
