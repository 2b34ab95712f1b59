"""`support-bundle` against recorded answers: contents, canaries, what is missing, and bounds."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.api import names
from fleetkeeper.commands.bundle import archive as archive_module
from fleetkeeper.commands.bundle.archive import INDEX_BYTES, ROOT, TEXT_BYTES, Archive
from fleetkeeper.commands.bundle.contents import CHILDREN, log_sources, node_summary
from fleetkeeper.exit_codes import ExitCode
from fleetkeeper_local.control_plane.ports import free_ports
from tests.support.plane.support_cluster import Recorded, recorded_cluster, status_of

pytestmark = pytest.mark.slow

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
FIS = f"/apis/fleetkeeper.io/v1alpha1/namespaces/team-a/{names.PLURAL}"
SYSTEM = "/api/v1/namespaces/fleetkeeper-system"
TEAM = "/api/v1/namespaces/team-a"


class Canaries:
    """Distinct values that no bundle may contain."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}

    def __call__(self, where: str) -> str:
        """Return a short word, so that no rule for long values finds it."""
        self.made[where] = f"canary{len(self.made)}x"
        return self.made[where]


def meta(name: str, namespace: str = "team-a", **more: object) -> dict[str, Any]:
    return {"name": name, "namespace": namespace, "uid": f"uid-{name}", **more}


def pod(name: str, namespace: str, container: dict[str, Any], **metadata: object) -> dict[str, Any]:
    return {
        "metadata": meta(name, namespace, **metadata),
        "spec": {"containers": [container]},
        "status": {
            "containerStatuses": [
                {"name": container["name"], "restartCount": 1, "state": {"running": {}}}
            ]
        },
    }


def world(canary: Canaries) -> dict[str, object]:
    """A service with an engine that restarted, and its operator; a canary wherever one may be."""
    service = {
        "metadata": meta("chat", annotations={LAST_APPLIED: canary("last applied")}),
        "spec": {
            "model": {"source": f"https://me:{canary('model URL')}@models.example/llama"},
            "engine": {
                "env": {"MINE": canary("spec env")},
                "options": {"api-key": canary("option")},
            },
        },
        "status": {
            "conditions": [
                {
                    "type": "Ready",
                    "status": "False",
                    "reason": "ModelMissing",
                    "message": f"GET https://models.example/a?sig={canary('condition')} failed",
                }
            ],
            "scaling": {
                "desired": 2,
                "reason": "QueueWaitAboveTarget",
                "message": f"prometheus http://p:{canary('decision')}@prometheus answers 310 ms",
            },
        },
    }
    engine = pod(
        "chat-1",
        "team-a",
        {
            "name": "engine",
            "env": [{"name": "HARMLESS", "value": canary("env value")}],
            "args": ["serve", "--api-key", canary("argument"), f"--x-token={canary('flag')}"],
            "command": ["sh", "-c", f"HF_TOKEN={canary('command')} exec vllm"],
            "livenessProbe": {
                "httpGet": {"httpHeaders": [{"name": "X", "value": canary("header")}]}
            },
        },
        annotations={"example.com/token": canary("annotation")},
    )
    config = {
        "metadata": meta("chat-fk-control"),
        "data": {
            "token": canary("ConfigMap value"),
            "a.yaml": f"env:\n- name: A\n  value: {canary('YAML in a ConfigMap')}\n",
        },
    }
    event = {
        "metadata": meta("chat.1"),
        "involvedObject": {"kind": "Pod", "name": "chat-1"},
        "message": f"pull of https://u:{canary('event')}@registry.example/x failed",
    }
    operator = pod("fleetkeeper-0", "fleetkeeper-system", {"name": "operator"})
    settings = {
        "metadata": meta("fleetkeeper-settings", "fleetkeeper-system"),
        "data": {
            "settings.yaml": f"prometheus:\n  url: https://u:{canary('settings')}@prometheus\n",
            "profiles.yaml": "profiles: []\n",
        },
    }
    foreign = {"metadata": meta("other", "fleetkeeper-system"), "data": {"x": canary("foreign")}}
    metrics = (
        'fleetkeeper_signal_queue_wait_seconds{service_namespace="team-a",'
        'inference_service="chat"} 0.31\n'
    )
    return {
        "/version": {"gitVersion": "v1.34.0"},
        f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}": {
            "metadata": {"name": names.CRD_NAME},
            "spec": {"versions": [{"name": "v1alpha1", "served": True, "schema": {"a": 1}}]},
        },
        "/api/v1/nodes": [
            {
                "metadata": {"name": "n1", "annotations": {"a": canary("node")}},
                "status": {"allocatable": {"nvidia.com/gpu": "8"}},
            }
        ],
        f"{FIS}/chat": service,
        FIS: [service],
        **{
            f"/{prefix}/namespaces/{namespace}/{plural}": []
            for plural, prefix in CHILDREN.items()
            for namespace in ("team-a", "fleetkeeper-system")
        },
        f"{TEAM}/pods": [engine],
        f"{TEAM}/configmaps": [config],
        f"{TEAM}/events": [
            event,
            {"involvedObject": {"name": "other"}, "message": canary("other")},
        ],
        f"{SYSTEM}/pods": [operator],
        f"{SYSTEM}/configmaps": [settings, foreign],
        f"{SYSTEM}/events": [],
        f"{SYSTEM}/pods/fleetkeeper-0:8080/proxy/metrics": metrics,
        f"{SYSTEM}/pods/fleetkeeper-0/log#operator": '{"event": "decision"}\n',
        f"{SYSTEM}/pods/fleetkeeper-0/log#operator?previous": "ended\n",
        f"{TEAM}/pods/chat-1/log#engine": f"Authorization: Bearer {canary('log')}\nready\n",
        f"{TEAM}/pods/chat-1/log#engine?previous": f"{{'api_key': ['{canary('old log')}']}}\n",
    }


def bundle(kubeconfig: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleetkeeper", "support-bundle", *map(str, arguments)],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},  # read once, at the import of the client
        capture_output=True,
        text=True,
        check=False,
    )


def contents(path: Path) -> dict[str, bytes]:
    """Return every entry of the archive by its path below the root."""
    with tarfile.open(path) as tar:
        return {
            member.name.removeprefix(f"{ROOT}/"): file.read()
            for member in tar
            if (file := tar.extractfile(member)) is not None
        }


def test_a_bundle_has_every_part_and_no_canary(tmp_path: Path) -> None:
    canary, out = Canaries(), tmp_path / "b.tar.gz"
    recorded = Recorded(world(canary))
    with recorded_cluster(recorded, tmp_path) as kubeconfig:
        result = bundle(kubeconfig, "chat", "-n", "team-a", "-o", out)
    assert result.returncode == ExitCode.OK, result.stderr
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    found = contents(out)
    service = "services/team-a/chat"
    assert set(found) == {
        "index.json",
        *(f"cluster/{name}.json" for name in ("crd", "nodes", "version")),
        *(f"operator/{name}.json" for name in ("pods", "configmaps")),
        *(f"operator/logs/fleetkeeper-0/operator{kind}.log" for kind in ("", ".previous")),
        "operator/metrics/fleetkeeper-0.txt",
        *(
            f"{service}/{name}.json"
            for name in ("inferenceservice", "pods", "configmaps", "events")
        ),
        *(f"{service}/logs/chat-1/engine{kind}.log" for kind in ("", ".previous")),
        f"{service}/explain.txt",
    }
    everything = b"\n".join(found.values())
    assert len(canary.made) > 20
    leaked = [where for where, value in canary.made.items() if value.encode() in everything]
    assert not leaked
    assert b"user-token" not in everything
    assert "310 / " in found[f"{service}/explain.txt"].decode()
    assert "QueueWaitAboveTarget" in found[f"{service}/explain.txt"].decode()
    assert found[f"{service}/logs/chat-1/engine.log"].endswith(b"ready\n")
    assert b"profiles.yaml" in found["operator/configmaps.json"]
    assert b"sha256:" in found["cluster/crd.json"]
    index = json.loads(found["index.json"])
    assert index["missing"] == index["cut"] == []
    assert not [path for path, _ in recorded.asked if "secrets" in path]
    assert "reading service team-a/chat" in result.stderr


def test_the_canaries_would_be_found_without_redaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prove that the test above can fail: each canary of a kept field is in what is read."""
    canary = Canaries()
    answers = world(canary)
    monkeypatch.setattr(archive_module, "redact", lambda value: value)
    archive = Archive()
    archive.add_object("a.json", answers)
    archive.write(tmp_path / "a", {}, force=False)
    assert all(v.encode() in contents(tmp_path / "a")["a.json"] for v in canary.made.values())


def test_what_is_refused_is_in_the_index(tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    answers = world(Canaries())
    answers["/api/v1/nodes"] = status_of(403, 'nodes is forbidden: User "me" cannot list')
    answers[f"{TEAM}/pods/chat-1/log#engine?previous"] = status_of(400, "previous not found")
    del answers[f"{FIS}/chat"]
    with recorded_cluster(Recorded(answers), tmp_path) as kubeconfig:
        result = bundle(kubeconfig, "chat", "-n", "team-a", "-o", out)
    assert result.returncode == ExitCode.OK, result.stderr
    assert "warning: 3 parts could not be read" in result.stderr
    found = contents(out)
    missing = {row["what"]: row["reason"] for row in json.loads(found["index.json"])["missing"]}
    assert missing == {
        "cluster/nodes.json": '403: nodes is forbidden: User "me" cannot list',
        "services/team-a/chat/inferenceservice.json": "404: not found",
        "services/team-a/chat/logs/chat-1/engine.previous.log": "400: previous not found",
    }
    assert "services/team-a/chat/pods.json" in found  # its children are found without it


def test_an_api_server_that_goes_away_in_the_middle_leaves_what_was_read(tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    recorded = Recorded(world(Canaries()))
    recorded.dies_after = 6
    with recorded_cluster(recorded, tmp_path) as kubeconfig:
        result = bundle(kubeconfig, "chat", "-n", "team-a", "-o", out)
    assert result.returncode == ExitCode.OK, result.stderr
    assert len(recorded.asked) == 6 + 2  # the request that failed, and /version
    index = json.loads(contents(out)["index.json"])
    reasons = [row["reason"] for row in index["missing"]]
    assert reasons[0].startswith("no response")
    assert set(reasons[1:]) == {"not tried: the API server stopped answering"}
    assert [row["path"] for row in index["files"]] == [
        *(f"cluster/{name}.json" for name in ("crd", "nodes", "version")),
        "operator/pods.json",
    ]


@pytest.mark.exhaustive
def test_a_bundle_of_nothing_is_a_failure(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    out = tmp_path / "b.tar.gz"
    with recorded_cluster(Recorded({}), tmp_path) as kubeconfig:
        refused = bundle(kubeconfig, "-o", out)
        text = json.loads(kubeconfig.read_text())
        text["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{port}"
        kubeconfig.write_text(json.dumps(text))
        away = bundle(kubeconfig, "-o", out)
    for result, reason in ((refused, "404"), (away, "no response")):
        assert result.returncode == ExitCode.FAILED
        assert "could not read anything" in result.stderr.splitlines()[-1]
        assert reason in result.stderr.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kubeconfig"]


@pytest.mark.exhaustive
def test_an_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    out.write_text("mine")
    with recorded_cluster(Recorded(world(Canaries())), tmp_path) as kubeconfig:
        refused = bundle(kubeconfig, "-n", "team-a", "-o", out)
        assert refused.returncode == ExitCode.FAILED
        assert "--force" in refused.stderr
        assert out.read_text() == "mine"
        forced = bundle(kubeconfig, "-n", "team-a", "-o", out, "--force")
    assert forced.returncode == ExitCode.OK, forced.stderr
    assert "services/team-a/chat/inferenceservice.json" in contents(out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "b"
    out.write_text("mine")
    with pytest.raises(FileExistsError):
        Archive().write(out, {}, force=False)
    assert out.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


def test_a_log_keeps_its_end_and_is_redacted_before_the_cut(tmp_path: Path) -> None:
    archive = Archive()
    # A cut inside the block would leave its end without the start by which it is known.
    line = "-----BEGIN KEY-----\n" + "a canary\n" * 20 + "-----END KEY-----" + "x y " * 20 + "\n"
    archive.add_text("a.log", line * (4 * TEXT_BYTES // len(line) + 100) + "last\n")
    index = archive.index({})
    assert index["cut"] == [{"what": "a.log", "reason": f"only the last {TEXT_BYTES} bytes"}]
    assert TEXT_BYTES - 2 * len(line) < index["files"][0]["bytes"] <= TEXT_BYTES
    archive.write(tmp_path / "b", {}, force=False)
    kept = contents(tmp_path / "b")["a.log"]
    assert kept.endswith(b"last\n")
    assert b"canary" not in kept


def test_the_bundle_is_bounded(tmp_path: Path) -> None:
    archive = Archive(limit=INDEX_BYTES + 1000)
    archive.add_text("a", "a b\n" * 100)
    archive.add_text("b", "a b\n" * 300)
    archive.add_text("c", "a b\n")
    assert archive.is_full
    archive.write(tmp_path / "b", {}, force=False)
    found = contents(tmp_path / "b")
    assert set(found) == {"index.json", "a", "c"}
    assert [row["what"] for row in json.loads(found["index.json"])["cut"]] == ["b"]


def test_a_container_that_never_started_has_no_log() -> None:
    status = {
        "initContainerStatuses": [{"name": "model", "state": {"terminated": {}}}],
        "containerStatuses": [
            {"name": "waits", "restartCount": 0, "state": {"waiting": {}}},
            {"name": "loops", "restartCount": 2, "state": {"waiting": {}}, "lastState": {"a": 1}},
        ],
    }
    assert list(log_sources({"status": status})) == [
        ("model", False),
        ("loops", False),
        ("loops", True),
    ]


def test_a_node_shows_its_accelerators_and_no_annotations() -> None:
    node = {
        "metadata": {"name": "n", "annotations": {"a": "b"}},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}},
    }
    assert node_summary(node)["allocatable"] == {"nvidia.com/gpu": "8"}
    assert "annotations" not in node_summary(node)
