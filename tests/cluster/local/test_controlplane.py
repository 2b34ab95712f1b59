"""The control plane that other tests stand on starts every time, fast, heals, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleetkeeper_local.control_plane.access import Endpoint, KubectlError
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.ports import PortInUse, free_ports

REASONABLE_MULTIPLE = 10
IDLE_START_S = 3.0


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"local-{uuid.uuid4().hex[:8]}"
    control_plane.kubectl("create", "namespace", name)
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_twenty_starts_in_a_row_all_succeed() -> None:
    """No start fails; the median of 20 stays within ten times the 3 s of an idle machine."""
    took_s: list[float] = []
    for _ in range(20):
        began = time.monotonic()
        with ControlPlane(scheduler=False) as plane:
            took_s.append(time.monotonic() - began)
            assert plane.healthy()
    print(
        f"\n20 starts: median {statistics.median(took_s):.2f} s, "
        f"fastest {min(took_s):.2f} s, slowest {max(took_s):.2f} s"
    )
    assert statistics.median(took_s) < REASONABLE_MULTIPLE * IDLE_START_S


@pytest.mark.exhaustive
def test_two_run_side_by_side_and_know_nothing_of_one_another(control_plane: ControlPlane) -> None:
    """A second control plane has its own ports, its own authority and its own objects."""
    with ControlPlane(scheduler=False) as other:
        other.kubectl("create", "namespace", "only-here")
        assert other.apiserver_url != control_plane.apiserver_url
        assert control_plane.get("/api/v1/namespaces/only-here") is None
        with pytest.raises(KubectlError, match="certificate"):
            # The other's certificate opens nothing here.
            control_plane.kubectl(
                "get",
                "namespaces",
                "--server",
                control_plane.apiserver_url,
                kubeconfig=other.kubeconfig,
            )


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_thousand_pods_on_a_hundred_fake_gpu_nodes_turn_ready() -> None:
    """100 nodes with 16 GPUs each, 1,000 pods that ask for one: all Ready, and the times are printed."""
    with ControlPlane() as plane:
        began = time.monotonic()
        names = plane.add_nodes(100, gpus=16)
        nodes_s = time.monotonic() - began
        assert len(names) == 100
        began = time.monotonic()
        plane.kubectl("create", "-f", "-", input=json.dumps(_deployment("many", 1000)))
        plane.kubectl("rollout", "status", "deployment/many", "--timeout=400s", timeout_s=420)
        pods_s = time.monotonic() - began
        print(f"\n100 nodes Ready after {nodes_s:.1f} s, 1,000 pods after {pods_s:.1f} s")
        pods = plane.get("/api/v1/namespaces/default/pods")["items"]
        per_node = [pod["spec"]["nodeName"] for pod in pods]
        assert len(per_node) == 1000
        assert max(per_node.count(name) for name in names) <= 16


def test_a_user_may_do_what_rbac_says_and_nothing_else(
    control_plane: ControlPlane, namespace: str
) -> None:
    """A fresh user is known by its certificate, may do nothing, and after a binding just that."""
    user = control_plane.user_kubeconfig("reader")
    whoami = json.loads(control_plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=user))
    assert whoami["status"]["userInfo"]["username"] == "reader"
    with pytest.raises(KubectlError, match=r"(?i)forbidden"):
        control_plane.kubectl("-n", namespace, "get", "pods", kubeconfig=user)
    control_plane.kubectl(
        "-n", namespace, "create", "rolebinding", "reader", "--clusterrole=view", "--user=reader"
    )
    control_plane.kubectl("-n", namespace, "get", "pods", kubeconfig=user)
    with pytest.raises(KubectlError, match=r"(?i)forbidden"):
        control_plane.kubectl("-n", namespace, "create", "configmap", "c", kubeconfig=user)


@pytest.mark.promise("local-certificates")
def test_nobody_comes_in_without_a_certificate(control_plane: ControlPlane) -> None:
    """Anonymous requests are refused: 401, also for the version."""
    done = subprocess.run(
        ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert",
         str(control_plane.ca_file), f"{control_plane.apiserver_url}/version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "401"


@pytest.mark.promise("local-loopback")
def test_everything_listens_on_loopback_only(control_plane: ControlPlane) -> None:
    """No component of the control plane can be reached from outside the machine."""
    listening = set()
    for name in control_plane.processes.names():
        process = control_plane.processes.running(name)
        assert process is not None
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr
                listening.add(connection.laddr.ip)
    assert listening == {"127.0.0.1"}


def test_every_request_is_in_the_audit_log_with_its_user(
    control_plane: ControlPlane, namespace: str
) -> None:
    """The audit log counts writes by user: what load and idleness tests measure by."""
    user = control_plane.user_kubeconfig("writer", groups=["system:masters"])
    control_plane.kubectl("-n", namespace, "create", "configmap", "noted", kubeconfig=user)
    events = [json.loads(line) for line in control_plane.audit_log.read_text().splitlines()]
    writes = [
        (event["verb"], event["objectRef"]["resource"], event["responseStatus"]["code"])
        for event in events
        if event["user"].get("username") == "writer" and event["verb"] == "create"
        and event.get("objectRef", {}).get("namespace") == namespace
    ]  # fmt: skip
    assert writes == [("create", "configmaps", 201)]


@pytest.mark.exhaustive
def test_a_killed_component_is_started_again_and_its_data_are_there(tmp_path: Path) -> None:
    """After kill -9 of any or all components, start heals; after a whole start it does nothing."""
    plane = ControlPlane(tmp_path / "plane", scheduler=False)
    try:
        plane.start()
        plane.kubectl("create", "configmap", "kept")
        for victims in (["etcd"], ["kube-apiserver"], plane.processes.names()):
            plane.processes.kill(victims)
            assert not plane.healthy()
            plane.start()
            assert plane.healthy()
            assert (
                plane.kubectl("get", "configmap", "kept", "-o", "name").strip() == "configmap/kept"
            )
        pids = {name: plane.processes.running(name) for name in plane.processes.names()}
        plane.start()
        assert pids == {name: plane.processes.running(name) for name in plane.processes.names()}
    finally:
        plane.stop()


@pytest.mark.exhaustive
def test_killed_fake_nodes_are_played_again(tmp_path: Path) -> None:
    """After kill -9 of kwok, start lets it play on: a pod turns Running."""
    with ControlPlane(tmp_path / "plane") as plane:
        plane.add_nodes(1)
        kwok = plane.processes.running("kwok")
        assert kwok is not None
        kwok.kill()
        kwok.wait()
        assert plane.processes.ended() == ["kwok"]
        assert not plane.healthy()
        plane.start()
        assert plane.processes.ended() == []
        assert plane.healthy()
        plane.kubectl("create", "deployment", "played", "--image=example.invalid/a")
        plane.kubectl("rollout", "status", "deployment/played", "--timeout=300s")


def test_a_taken_port_is_named_with_its_process(tmp_path: Path) -> None:
    """A port that was asked for and is taken stops the start: port and process are named."""
    [api] = free_ports(1)
    with socket.create_server(("127.0.0.1", api)):
        plane = ControlPlane(tmp_path / "plane", endpoint=Endpoint.free(api=api))
        with pytest.raises(PortInUse, match=rf"127.0.0.1:{api}.*pid {os.getpid()}"):
            plane.start()
    assert plane.processes.names() == []


@pytest.mark.exhaustive
def test_truncated_files_of_an_interrupted_start_are_made_anew(tmp_path: Path) -> None:
    """A data folder in which a crash left half-written files starts like a fresh one."""
    folder = tmp_path / "plane"
    with ControlPlane(folder, scheduler=False):
        pass
    for name in ("apiserver.crt", "etcd.key", "admin.crt"):
        (folder / "pki" / name).write_bytes(b"")
    (folder / "control-plane.json").write_text('{"host": "127.0')
    with ControlPlane(folder, scheduler=False) as plane:
        assert plane.healthy()


@pytest.mark.exhaustive
def test_a_killed_test_session_leaves_no_process(tmp_path: Path) -> None:
    """When the process that holds a control plane is killed, the kernel ends its components."""
    script = (
        "import sys; from fleetkeeper_local.control_plane.control_plane import ControlPlane\n"
        "plane = ControlPlane(scheduler=False).start()\n"
        "print(*[plane.processes.running(n).pid for n in plane.processes.names()], plane.directory)\n"
        "sys.stdout.flush(); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as session:  # fmt: skip
        assert session.stdout is not None
        *pids, _ = session.stdout.readline().split()
        assert len(pids) == 3
        components = [psutil.Process(int(pid)) for pid in pids]
        session.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(components, timeout=10)
    assert alive == []


def _deployment(name: str, replicas: int) -> dict[str, object]:
    container = {
        "name": "main",
        "image": "none",
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [container]},
            },
        },
    }
