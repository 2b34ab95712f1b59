"""The parts of the local cluster that need no cluster: certificates, ports, processes, locks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml
from cryptography import x509

from fleetkeeper_local import cli
from fleetkeeper_local.common import lock
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.control_plane import control_plane, ports, programs
from fleetkeeper_local.control_plane.access import Endpoint
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from fleetkeeper_local.control_plane.kubeconfig import write_kubeconfig
from fleetkeeper_local.control_plane.pki import Authority, ensure_signing_key
from fleetkeeper_local.control_plane.ports import PortInUse, free_ports, is_free, require_free
from fleetkeeper_local.control_plane.processes import ComponentFailed, Processes
from fleetkeeper_local.control_plane.program_table import COSTS, PROGRAMS
from fleetkeeper_local.images import builder, registry
from fleetkeeper_local.node import addons, cleanup, flags, hostnet, preflight
from fleetkeeper_local.node.node import Node
from fleetkeeper_local.node.settings import NodeSettings
from tests.support.lanes import share_of_ports
from tests.support.node.node_world import mounts_outside


def test_a_certificate_names_its_user_groups_and_hosts_and_is_kept(tmp_path: Path) -> None:
    """Issuing twice keeps the file; a file cut short by a crash is made anew."""
    authority = Authority(tmp_path, "ca").ensure()
    identity = authority.issue("web", "user", groups=["a", "b"], hosts=["h.example", "10.0.0.1"])
    content = identity.certificate.read_bytes()
    certificate = x509.load_pem_x509_certificate(content)
    assert certificate.subject.rfc4514_string() == "CN=user,O=b,O=a"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == {"h.example", "10.0.0.1"}
    assert identity.key.stat().st_mode & 0o777 == 0o600
    assert authority.issue("web", "user").certificate.read_bytes() == content
    identity.certificate.write_bytes(content[:100])
    assert authority.issue("web", "user").usable(authority.issue("web", "user")) is False
    assert identity.usable()


def test_a_new_authority_does_not_keep_certificates_of_the_old(tmp_path: Path) -> None:
    """A certificate that its authority did not sign is issued again."""
    before = Authority(tmp_path, "ca").ensure().issue("web", "user").certificate.read_bytes()
    (tmp_path / "ca.key").unlink()
    assert (
        Authority(tmp_path, "ca").ensure().issue("web", "user").certificate.read_bytes() != before
    )


def test_a_signing_key_is_kept_and_its_halves_belong_together(tmp_path: Path) -> None:
    """A public half of another key is replaced with its private half."""
    one = ensure_signing_key(tmp_path, "sa")
    kept = one.key.read_bytes()
    assert ensure_signing_key(tmp_path, "sa").key.read_bytes() == kept
    other = ensure_signing_key(tmp_path / "other", "sa")
    one.certificate.write_bytes(other.certificate.read_bytes())
    assert ensure_signing_key(tmp_path, "sa").key.read_bytes() != kept


def test_a_kubeconfig_holds_all_it_needs_and_is_private(tmp_path: Path) -> None:
    """It can be copied anywhere: no path is in it. Mode 0600."""
    authority = Authority(tmp_path, "ca").ensure()
    path = write_kubeconfig(
        tmp_path / "k", "https://h:1", authority.certificate, "u", authority.issue("u", "u")
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert str(tmp_path) not in path.read_text()
    assert yaml.safe_load(path.read_text())["current-context"] == "fleetkeeper-local"


def test_a_taken_port_is_named_with_its_process() -> None:
    """The message tells which port, who holds it, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(PortInUse, match=rf"kubelet needs 127\.0\.0\.1:{port}.*{os.getpid()}"):
            require_free("127.0.0.1", port, "kubelet")
    assert len(set(free_ports(20))) == 20


def test_a_port_is_given_once_until_all_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked first may not listen yet when the second asks."""
    monkeypatch.setattr(ports, "_left", [])
    monkeypatch.setattr(ports, "is_free", lambda _host, port: port % 2 == 0)
    monkeypatch.setattr(ports, "LOWEST", 20000)
    monkeypatch.setattr(ports, "HIGHEST", 20020)
    assert {free_ports(1)[0] for _ in range(10)} == set(range(20000, 20020, 2))
    assert free_ports(1)[0] in range(20000, 20020, 2)


def test_two_workers_look_for_ports_in_different_places() -> None:
    """Stand-ins on the same addresses of loopback, in two workers, would take each other's."""
    shares = [
        share_of_ports({"PYTEST_XDIST_WORKER": f"gw{n}", "PYTEST_XDIST_WORKER_COUNT": "4"})
        for n in range(4)
    ]
    assert all(low < high for low, high in shares)
    assert all(high <= low for (_, high), (low, _) in pairwise(shares))


def test_who_listens_elsewhere_takes_no_port_of_an_address_that_is_still_to_come() -> None:
    """The bridge of a node is made after the check; who listens on every address has it too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_free("10.255.255.1", server.getsockname()[1], "prometheus", exists=False)
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"prometheus needs 10\.255\.255\.1:{port}"):
            require_free("10.255.255.1", port, "prometheus", exists=False)


def test_a_process_is_found_by_a_later_call_and_a_reused_pid_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    """Records hold the start time: a later process with the same pid is a stranger."""
    first = Processes(tmp_path, tied=True)
    assert first.start("sleeper", ["sleep", "100"])
    assert not first.start("sleeper", ["sleep", "100"])
    later = Processes(tmp_path, tied=False)
    found = later.running("sleeper")
    assert found is not None
    record = tmp_path / "run" / "sleeper.json"
    kept = record.read_text()
    record.write_text(kept.replace('"create_time": ', '"create_time": 1'))
    assert later.running("sleeper") is None
    record.write_text(kept)
    assert first.start("sleeper", ["sleep", "101"])  # another command line: started anew
    assert not psutil.pid_exists(found.pid)
    first.stop(["sleeper"])
    assert first.names() == []


def test_a_component_that_ends_at_its_start_is_reported_at_once_with_its_log(
    tmp_path: Path,
) -> None:
    """Nobody waits for the time-out of a process that is dead; a taken port is told apart."""
    processes = Processes(tmp_path, tied=True)
    processes.start("broken", [sys.executable, "-c", "print('no such file: x.crt'); exit(1)"])
    with pytest.raises(ComponentFailed, match=r"no such file: x\.crt"):
        processes.await_ready("broken", lambda: False, 60)
    processes.start("bound", [sys.executable, "-c", "exit('bind: address already in use')"])
    with pytest.raises(PortInUse):
        processes.await_ready("bound", lambda: False, 60)


def test_what_answers_in_place_of_a_component_that_ended_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    """Another's server on the same port satisfies a probe; the component is told as ended all the same."""
    processes = Processes(tmp_path, tied=True)
    processes.start("late", [sys.executable, "-c", "exit('bind: address already in use')"])
    if (process := processes.running("late")) is not None:
        process.wait()
    assert processes.ended() == ["late"]
    with pytest.raises(PortInUse, match="late ended while starting"):
        processes.await_ready("late", lambda: True, 60)


def test_a_locked_folder_names_its_holder_and_a_dead_holders_lock_is_free(tmp_path: Path) -> None:
    """The kernel frees the lock; the file that stays behind is none."""
    script = (
        "import sys; from pathlib import Path; from fleetkeeper_local.common.lock import exclusive\n"
        f"with exclusive(Path({str(tmp_path)!r})): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LocalError, match=rf"pid {holder.pid}"), lock.exclusive(tmp_path):
            pass
        holder.kill()
    assert (tmp_path / "lock").exists()
    with lock.exclusive(tmp_path):
        pass


def test_without_root_what_is_missing_and_what_works_instead_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal names the lack, --control-plane-only, and a cluster of one's own."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LocalError, match=r"(?s)root is needed.*--control-plane-only.*--kubeconfig"):
        preflight.check_machine(NodeSettings(directory=tmp_path / "not" / "yet"))


def test_too_little_disk_and_memory_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is missing is in one message, with the figures."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(preflight, "DISK_GIB", 10**6)
    monkeypatch.setattr(preflight, "MEMORY_GIB", 10**6)
    with pytest.raises(LocalError, match=r"(?s)1000000 GiB must be free.*1000000 GiB of memory"):
        preflight.check_machine(NodeSettings(directory=tmp_path))


def test_a_folder_with_other_things_is_never_used_nor_emptied(tmp_path: Path) -> None:
    """`up --dir ~` and `down --dir ~` are refused: `down` removes what a cluster's folder holds."""
    (tmp_path / "thesis.txt").write_text("dear")
    node = Node(NodeSettings(directory=tmp_path))
    with pytest.raises(LocalError, match="not empty"):
        node.up()
    with pytest.raises(LocalError, match=str(tmp_path)):
        node.down(purge=True)
    with pytest.raises(LocalError, match=str(tmp_path)):
        control_plane.remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_kubelet_that_containerd_does_not_serve_yet_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is there before its CRI is: the kubelet asks once, and ends."""
    asked, ready = tmp_path / "asked", tmp_path / "ready"
    script = f"""
import pathlib, sys, time
if not pathlib.Path({str(asked)!r}).exists():
    pathlib.Path({str(asked)!r}).touch()
    sys.exit("validate CRI v1 runtime API: rpc error: server is not initialized yet: unavailable")
pathlib.Path({str(ready)!r}).touch()
time.sleep(600)
"""
    node = Node(NodeSettings(directory=tmp_path / "node"))
    monkeypatch.setattr(flags, "kubelet", lambda _: [sys.executable, "-c", script])
    monkeypatch.setattr(node, "_node_ready", ready.exists)
    try:
        node._start_kubelet()
        assert node.processes.running("kubelet") is not None
        node.processes.kill(["kubelet"])
        ready.unlink()
        monkeypatch.setattr(flags, "kubelet", lambda _: [sys.executable, "-c", "exit('no disk')"])
        with pytest.raises(ComponentFailed, match="no disk"):
            node._start_kubelet()
    finally:
        node.processes.kill(["kubelet"])


def test_settings_survive_the_command_and_a_half_written_file_means_the_defaults(
    tmp_path: Path,
) -> None:
    """`status` and `down` use the ports that `up` was given."""
    settings = NodeSettings(directory=tmp_path, registry_port=5001, bridge="fk7")
    flags.write_settings(settings)
    assert flags.read_settings(tmp_path) == settings
    (tmp_path / flags.SETTINGS_FILE).write_text('{"bridge": "fk')
    assert flags.read_settings(tmp_path) == NodeSettings(directory=tmp_path)


def _write_all_files(settings: NodeSettings, endpoint: Endpoint) -> None:
    """Write what `up` writes before it starts the components."""
    flags.write_settings(settings)
    registry.write_registry_config(
        settings.directory / "registry.yaml", settings.directory / "registry", 5000
    )
    flags.write_node_configs(settings, "localhost:5000/pause:1")
    addons.write_prometheus_config(settings)
    ControlPlane(settings.directory, endpoint=endpoint, real_node=True)._write_files()


def test_a_second_up_writes_no_file_and_mends_the_one_that_differs(tmp_path: Path) -> None:
    """kube-proxy ends when its configuration is written, even with the same content."""

    def written() -> dict[Path, tuple[int, int]]:
        """Return the inode and the time of the last change by file."""
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {path: ((stat := path.stat()).st_ino, stat.st_ctime_ns) for path in files}

    settings, endpoint = NodeSettings(directory=tmp_path), Endpoint.free()
    _write_all_files(settings, endpoint)
    before = written()
    _write_all_files(settings, endpoint)
    assert [path for path, stamp in written().items() if before[path] != stamp] == []

    harmed = tmp_path / "kube-proxy.yaml"
    kept = harmed.read_text()
    harmed.write_text(kept[:40])
    (tmp_path / "admin.kubeconfig").chmod(0o644)
    _write_all_files(settings, endpoint)
    changed = {path.name for path, stamp in written().items() if before[path] != stamp}
    assert changed == {"kube-proxy.yaml", "admin.kubeconfig"}
    assert harmed.read_text() == kept
    assert (tmp_path / "admin.kubeconfig").stat().st_mode & 0o777 == 0o600


def test_namespaces_are_read_from_what_cni_wrote_and_a_half_written_file_is_passed_over(
    tmp_path: Path,
) -> None:
    """Only those that our own network attached are ever removed."""
    (tmp_path / "fleetkeeper-local-abc-eth0").write_text(
        '{"result": {"interfaces": [{"name": "veth1"}, {"sandbox": "/var/run/netns/cni-1"}]}}'
    )
    (tmp_path / "fleetkeeper-local-def-eth0").write_text('{"result": ')
    (tmp_path / "other-abc-eth0").write_text(
        '{"result": {"interfaces": [{"sandbox": "/var/run/netns/cni-2"}]}}'
    )
    assert hostnet.namespaces_on(tmp_path, "fleetkeeper-local") == ["cni-1"]


def test_no_mount_of_another_folder_is_touched(tmp_path: Path) -> None:
    """A folder whose name begins alike is another folder."""
    assert cleanup.mounts_below(tmp_path) == []
    assert cleanup.mounts_below(Path("/pro")) == []
    assert "/proc" in cleanup.mounts_below(Path("/proc"))


def test_mounts_of_the_shared_image_store_say_nothing_about_a_node() -> None:
    """A build in another session mounts the store while a test compares the machine."""
    mountinfo = (
        "24 1 0:22 / /proc rw - proc proc rw\n"
        "90 1 8:1 /c/buildah/storage/overlay /c/buildah/storage/overlay rw - ext4 /dev/sda1 rw\n"
        "91 1 8:1 / /c/buildah-other rw - ext4 /dev/sda1 rw\n"
    )
    assert mounts_outside(Path("/c/buildah"), mountinfo) == {"/proc", "/c/buildah-other"}


def test_a_changed_source_or_flag_is_another_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cache key covers sources and flags: a stale binary is never used."""
    (tmp_path / "pause").mkdir()
    (tmp_path / "pause" / "main.go").write_text("package main")
    monkeypatch.setattr(programs, "NODE_SOURCES", tmp_path)
    monkeypatch.setenv("FLEETKEEPER_CACHE", str(tmp_path / "cache"))
    program = PROGRAMS["pause"]
    before = programs._home(program)
    (tmp_path / "pause" / "main.go").write_text("package main // changed")
    assert programs._home(program) != before
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LocalError, match="install Go"):
        programs.program_path("pause")
    with pytest.raises(LocalError, match=r"'nonsense'.*kubectl"):
        programs.program_path("nonsense")


def test_neither_tests_nor_the_demo_wait_for_programs_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each program has a cost and a purpose, which a build prints; the longest build is first."""
    assert COSTS.keys() == PROGRAMS.keys()
    asked: list[str] = []
    monkeypatch.setattr(cli, "build_programs", asked.extend)
    cli.build()
    assert set(PROGRAMS) - set(asked) == {"cosign"}
    asked.clear()
    cli.build(demo=True)
    skipped = {"cosign", "actionlint", "kstatus", "kwok", "promtool"}
    assert set(PROGRAMS) - set(asked) == skipped


def test_a_build_says_what_why_and_how_long_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEETKEEPER_CACHE", str(tmp_path))
    monkeypatch.setattr(programs, "_check_tools", lambda _: None)
    begun: list[str] = []
    monkeypatch.setattr(programs, "_build", lambda program: begun.append(program.name))
    programs.build_programs(["pause", "helm", "kubectl"])
    shown = capsys.readouterr().err
    assert sorted(begun) == ["fleetkeeper-node", "helm", "pause"]
    assert "about 16 minutes of processor time" in shown
    lines = [line for line in shown.splitlines() if " min  " in line]
    assert [line.split()[1] for line in lines] == ["fleetkeeper-node", "helm", "pause"]
    assert "installs the charts" in lines[1]


@pytest.mark.promise("local-loopback")
def test_every_component_listens_on_loopback_or_the_bridge_alone(tmp_path: Path) -> None:
    """No configuration that we write names an address of the outside, or all addresses."""
    settings = NodeSettings(directory=tmp_path)
    flags.write_node_configs(settings, "localhost:5000/pause:1")
    addons.write_prometheus_config(settings)
    texts = [path.read_text() for path in tmp_path.glob("*.*")]
    assert len(texts) == 4
    assert not any("0.0.0.0" in text.replace("0.0.0.0/0", "") for text in texts)


@pytest.mark.parametrize(("freed_gib", "refused"), [(50.0, False), (2.0, True)])
def test_a_build_without_disk_removes_earlier_builds_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed_gib: float, refused: bool
) -> None:
    monkeypatch.setenv("FLEETKEEPER_CACHE", str(tmp_path))
    free = [1.0]
    monkeypatch.setattr(builder, "_free_gib", lambda _folder: free[-1])
    monkeypatch.setattr(builder, "_prune", lambda: free.append(freed_gib))
    if refused:
        with pytest.raises(LocalError, match=r"15 GiB .*2\.0 GiB.*FLEETKEEPER_CACHE"):
            builder._check_disk()
    else:
        builder._check_disk()
    assert free == [1.0, freed_gib]


def test_killed_shims_leave_no_socket_and_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this node's containers, even if their bundles are gone; what others use stays."""
    shims = tmp_path / "shims"
    monkeypatch.setattr(cleanup, "SHIM_STATE", shims)
    settings = NodeSettings(directory=tmp_path / "node")
    for name, directory in (("ours", settings.directory), ("theirs", tmp_path / "node-2")):
        state = shims / "runc/k8s.io" / name / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps({"config": {"labels": [f"bundle={directory}/x", "other"]}}))
    (shims / "s").mkdir()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as living,
    ):
        dead.bind(str(shims / "s/dead"))
        living.bind(str(shims / "s/living"))
        living.listen()
        cleanup.end_shims(settings)
    assert [path.name for path in shims.glob("s/*")] == ["living"]
    assert [path.name for path in shims.glob("runc/k8s.io/*")] == ["theirs"]
