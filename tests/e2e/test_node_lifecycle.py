"""A node comes up once, heals, refuses clearly, and goes without a trace."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fleetkeeper_local.common import lock
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.images import builder
from fleetkeeper_local.node import cleanup
from fleetkeeper_local.node.node import STOP_ORDER, Node
from fleetkeeper_local.node.settings import NodeSettings
from fleetkeeper_local.node.weight import COMPONENT_NICE, POD_WEIGHTS
from tests.support.node.node_world import MachineState, Pods, machine_state, pod_manifest, until

SLEEP = "import time; print('up'); time.sleep(3600)"


def _pids(node: Node) -> dict[str, int]:
    return {
        name: process.pid
        for name in node.processes.names()
        if (process := node.processes.running(name)) is not None
    }


def test_a_second_up_does_nothing(node: Node) -> None:
    """It is a no-op: the same processes run before and after, and it says so."""
    before = _pids(node)
    assert node.up() is False
    assert _pids(node) == before


def test_up_starts_what_is_missing_and_disturbs_nothing_else(node: Node) -> None:
    """No file is written that is as it should be: kube-proxy ends when its configuration is."""

    def configuration() -> dict[str, int]:
        files = [*node.directory.glob("*.*"), *node.directory.glob("cni/net.d/*")]
        return {path.name: path.stat().st_ctime_ns for path in files if path.suffix != ".log"}

    before, written = _pids(node), configuration()
    node.processes.stop(["prometheus"])
    assert node.up() is True
    after = _pids(node)
    assert {name for name in before if after[name] != before[name]} == {"prometheus"}
    assert configuration() == written


@pytest.mark.exhaustive
@pytest.mark.parametrize("victims", [["kubelet"], ["containerd"], ["kube-apiserver", "etcd"], None])
def test_up_heals_after_kill_and_pods_live_on(
    node: Node, pods: Pods, python_image: str, victims: list[str] | None
) -> None:
    """After kill -9 of any component or of all, `up` brings it back; the pods never restarted."""
    pods.create(pod_manifest("survivor", python_image, SLEEP))
    pods.await_ready("survivor")
    before = pods.container("survivor")["containerID"]
    wanted = victims or list(_pids(node))
    assert set(wanted) <= {*STOP_ORDER, "containerd"}
    for name in wanted:
        process = node.processes.running(name)
        assert process is not None
        process.kill()
    until(lambda: not node.healthy(), "the damage shows")
    assert node.up() is True
    assert node.healthy()
    status = pods.container("survivor")
    assert (status["containerID"], status["restartCount"]) == (before, 0)
    # The healed node still starts and ends pods.
    assert pods.run("fresh", python_image, "print('works')").strip() == "works"


def test_the_node_outweighs_the_other_sessions_of_the_machine(node: Node) -> None:
    """Also its components that were started again; else a busy machine starves what is tested on it."""
    assert node.healthy()
    weights = {
        (group / name).read_text().strip()
        for group in cleanup.kubepods_cgroups()
        for name in POD_WEIGHTS
        if (group / name).exists()
    }
    assert len(weights) == 1
    assert weights < {str(weight) for weight in POD_WEIGHTS.values()}
    for name, pid in _pids(node).items():
        group = Path(f"/proc/{pid}/autogroup").read_text()
        assert group.split()[-1] == str(COMPONENT_NICE), name


def test_everything_listens_on_loopback_or_the_bridge_alone(node: Node) -> None:
    """No component can be reached from outside the machine."""
    addresses = set()
    for name in node.processes.names():
        process = node.processes.running(name)
        assert process is not None
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr
                addresses.add(connection.laddr.ip)
    assert addresses <= {"127.0.0.1", "::1", node.settings.node_ip}


def test_a_second_node_is_refused_and_the_first_is_named(node: Node, tmp_path: Path) -> None:
    """There is one node a machine: cgroups and packet filter tables are the machine's."""
    with pytest.raises(LocalError, match=str(node.directory)):
        Node(NodeSettings(directory=tmp_path / "other")).up()
    assert node.healthy()


def test_a_command_at_work_locks_others_out_and_its_death_frees_the_lock(
    node: Node, tmp_path: Path
) -> None:
    """The holder is named; a lock file that a killed command left behind is no lock."""
    script = (
        "import sys; from pathlib import Path; from fleetkeeper_local.common.lock import exclusive\n"
        f"with exclusive(Path({str(node.directory)!r})):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LocalError, match=f"pid {holder.pid}"):
            node.up()
        holder.kill()
    assert node.up() is False


@pytest.mark.exhaustive  # the end of each session shows the same (conftest.py)
@pytest.mark.parametrize("times", [1, 2])
def test_down_leaves_nothing_behind_and_the_next_up_finds_its_images(
    node: Node, python_image: str, machine_before: MachineState, times: int
) -> None:
    """No process, mount, namespace, interface, packet filter table, cgroup or setting stays."""
    for _ in range(times):
        pods = Pods(node.plane, "default")
        pods.create(pod_manifest("last", python_image, SLEEP))
        pods.await_ready("last")
        during = machine_state(node.directory)
        assert during.interfaces > machine_before.interfaces
        began = time.monotonic()
        node.down()
        down_s = time.monotonic() - began
        assert machine_state(node.directory) == machine_before
        assert lock.machine_owner() is None
        began = time.monotonic()
        assert node.up() is True
        print(f"\ndown {down_s:.1f} s, up again {time.monotonic() - began:.1f} s")
        assert builder.base_image().push(node.settings.registry_port) == python_image


@pytest.mark.exhaustive
def test_down_after_everything_was_killed_leaves_nothing_behind(
    node: Node, python_image: str, machine_before: MachineState
) -> None:
    """Shims, containers and image volumes whose containerd is dead are found and ended too."""
    pods = Pods(node.plane, "default")
    mount = {"name": "files", "mountPath": "/files", "readOnly": True}
    pod = pod_manifest("orphan", python_image, SLEEP, volumeMounts=[mount])
    pod["spec"]["volumes"] = [{"name": "files", "image": {"reference": python_image}}]
    pods.create(pod)
    pods.await_ready("orphan")
    assert "os-release" in pods.kubectl("exec", "orphan", "--", "ls", "/files/etc")
    node.processes.kill(node.processes.names())
    try:
        node.down()
        assert machine_state(node.directory) == machine_before
    finally:
        node.up()
