"""A support bundle of a user who may read only InferenceServices: the index lists what was forbidden."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from fleetkeeper.commands.bundle.archive import ROOT
from fleetkeeper.commands.bundle.contents import CHILDREN
from fleetkeeper.exit_codes import ExitCode
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.operator_world import service
from tests.support.plane.crds import install_crds

NAMESPACE = "support-bundle"
USER = "support-bundle-reader"


def test_a_user_with_few_rights_gets_a_bundle_that_says_so(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    kubectl, out = control_plane.kubectl, tmp_path / "b.tar.gz"
    kubectl("create", "namespace", NAMESPACE)
    try:
        install_crds(control_plane)
        body = {**service("chat"), "metadata": {"name": "chat", "namespace": NAMESPACE}}
        kubectl("create", "-f", "-", input=json.dumps(body))
        role = ("--verb=get,list", "--resource=inferenceservices.fleetkeeper.io")
        kubectl("-n", NAMESPACE, "create", "role", "reader", *role)
        kubectl(
            "-n", NAMESPACE, "create", "rolebinding", "reader", "--role=reader", f"--user={USER}"
        )
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "fleetkeeper",
                "support-bundle",
                "-n",
                NAMESPACE,
                "-o",
                str(out),
            ],
            env={**os.environ, "KUBECONFIG": str(control_plane.user_kubeconfig(USER))},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    assert result.returncode == ExitCode.OK, result.stderr
    with tarfile.open(out) as tar:
        file = tar.extractfile(f"{ROOT}/index.json")
        assert file is not None
        index = json.load(file)
    folder = f"services/{NAMESPACE}/chat"
    assert [row["path"] for row in index["files"]] == [
        "cluster/version.json",
        f"{folder}/explain.txt",
        f"{folder}/inferenceservice.json",
    ]
    missing = {row["what"]: row["reason"] for row in index["missing"]}
    assert all(reason.startswith("403: ") for reason in missing.values()), missing
    assert {f"{folder}/{plural}.json" for plural in (*CHILDREN, "events")} <= set(missing)
    assert {"cluster/crd.json", "cluster/nodes.json", "operator/pods.json"} <= set(missing)
    assert USER in missing["cluster/nodes.json"]
    assert "could not be read" in result.stderr
