"""`fleetkeeper wake` marks the present sleep, and says why it would be in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fleetkeeper.cli import app
from fleetkeeper.commands.fleet import wake as module
from fleetkeeper.exit_codes import ExitCode
from fleetkeeper.fleet.source import load_api
from tests.support.plane.support_cluster import Recorded, recorded_cluster, status_of

PATH = "/apis/fleetkeeper.io/v1alpha1/namespaces/team-a/inferenceservices/chat"
ASLEEP = {"number": 7, "state": "Asleep"}


def run(answer: object, folder: Path, patched: pytest.MonkeyPatch) -> tuple[Result, Recorded]:
    """Run `fleetkeeper wake chat -n team-a` against a server with this service."""
    recorded = Recorded({PATH: answer})
    with recorded_cluster(recorded, folder) as kubeconfig:
        patched.setattr(module, "load_api", lambda: load_api(str(kubeconfig)))
        return CliRunner().invoke(app, ["wake", "chat", "-n", "team-a"]), recorded


def service(sleep: object, **spec: Any) -> dict[str, Any]:
    return {"spec": spec, "status": {"sleep": sleep}}


@pytest.mark.parametrize(("state", "words"), [("Asleep", "wakes"), ("GoingToSleep", "stays awake")])
def test_the_annotation_is_the_number_of_the_sleep(
    state: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, server = run(service({"number": 7, "state": state}), tmp_path, monkeypatch)
    assert (done.exit_code, done.stdout) == (0, f"team-a/chat {words}\n")
    mark = {"metadata": {"annotations": {"fleetkeeper.io/wake": "7"}}}
    assert server.patched == [("application/merge-patch+json", mark)]


def test_a_service_that_wakes_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, server = run(service({"number": 7, "state": "Waking"}), tmp_path, monkeypatch)
    assert (done.exit_code, done.stdout) == (0, "team-a/chat wakes already; nothing changed\n")
    assert server.patched == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (service({"number": 7}), "team-a/chat is awake"),
        (service({"number": 7, "state": "Swapping"}), "team-a/chat is awake"),
        (service(None), "team-a/chat is awake"),
        ({"spec": {}}, "team-a/chat is awake"),
        (service(ASLEEP, paused=True), "while spec.paused is true"),
        (service(ASLEEP, suspend=True), "while spec.suspend is true"),
        (service(ASLEEP, replicas=0), "while spec.replicas is 0"),
        (service(ASLEEP, scaling={"mode": "External"}), "while spec.scaling.mode is External"),
        (status_of(404, "not found"), "404 Not Found; check the name"),
    ],
)
def test_what_would_be_in_vain_is_refused_in_one_line(
    found: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, server = run(found, tmp_path, monkeypatch)
    assert (done.exit_code, done.stdout, server.patched) == (ExitCode.FAILED, "", [])
    (line,) = done.stderr.splitlines()
    assert words in line
