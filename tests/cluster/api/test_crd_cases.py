"""The CRD on a real API server: what it accepts, refuses, fills in and shows."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetkeeper.api import names
from fleetkeeper.api.names import UNWRITTEN_STATUS
from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.values.quantity import canonical_quantity, parse_quantity
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.plane.crds import install_crds
from tests.support.reconcile.service_cases import Case, cases

NAMESPACE = "crd-cases"


@dataclass(frozen=True)
class Answer:
    """What the API server said: the object, or (field, message) of each mistake."""

    code: int
    body: dict[str, Any]

    @property
    def mistakes(self) -> dict[str, str]:
        if self.code < 400:
            return {}
        causes = self.body.get("details", {}).get("causes") or ()
        return {cause.get("field", ""): cause.get("message", "") for cause in causes}


Send = Callable[..., Answer]


@pytest.fixture(scope="module")
def send(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    """Creates a service in the API server's own strict mode, without keeping it.

    What a test keeps goes with the namespace: a later test's operator may serve all namespaces.
    """
    install_crds(control_plane)
    control_plane.kubectl("create", "namespace", NAMESPACE)
    connection = connected(control_plane, tmp_path_factory.mktemp("identity"))

    def sent(manifest: dict[str, Any], *, validation: str = "Strict", keep: bool = False) -> Answer:
        path = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
        query = f"?fieldValidation={validation}" + ("" if keep else "&dryRun=All")
        connection.request(
            "POST", path + query, json.dumps(manifest), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return Answer(answer.status, json.loads(answer.read()))

    yield sent
    connection.close()
    control_plane.kubectl("delete", "namespace", NAMESPACE, "--timeout=300s")


def connected(control_plane: ControlPlane, folder: Path) -> http.client.HTTPSConnection:
    """One connection as administrator, kept open for hundreds of requests."""
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    user = config["users"][0]["user"]
    context = ssl.create_default_context(cafile=str(control_plane.ca_file))
    identity: list[Path] = []
    for part in ("certificate", "key"):
        identity.append(folder / f"admin.{part}")
        identity[-1].write_bytes(base64.b64decode(user[f"client-{part}-data"]))
    context.load_cert_chain(identity[0], identity[1])
    address = urllib.parse.urlsplit(control_plane.apiserver_url)
    return http.client.HTTPSConnection(
        str(address.hostname), address.port, context=context, timeout=30
    )


def named(case: Case) -> str:
    return case.case


@pytest.mark.parametrize("case", [c for c in cases() if not c.refused_by_server], ids=named)
def test_a_good_service_is_accepted(send: Send, case: Case) -> None:
    answer = send(case.manifest(NAMESPACE))
    assert answer.code == 201, answer.body


@pytest.mark.parametrize(
    "case", [c for c in cases() if not c.refused_by_server and not c.refused_by_operator], ids=named
)
def test_the_server_fills_in_the_defaults_that_the_operator_fills_in(
    send: Send, case: Case
) -> None:
    stored = send(case.manifest(NAMESPACE)).body["spec"]
    filled = parse_service(case.manifest(NAMESPACE)).spec.to_manifest()
    assert with_texts(stored, filled) == filled
    assert (
        parse_service(case.manifest(NAMESPACE)).spec
        == parse_service({**case.manifest(NAMESPACE), "spec": stored}).spec
    )


def with_texts(stored: Any, filled: Any) -> Any:
    """What the server stored, with quantities that are numbers as texts, as the operator reads them."""
    if isinstance(stored, dict):
        return {key: with_texts(value, filled.get(key)) for key, value in stored.items()}
    is_number = isinstance(stored, int) and not isinstance(stored, bool)
    return str(stored) if is_number and isinstance(filled, str) else stored


@pytest.mark.promise("variables-by-name")
@pytest.mark.parametrize("case", [c for c in cases() if c.refused_by_server], ids=named)
def test_a_bad_service_is_refused_with_its_field_and_what_to_do(send: Send, case: Case) -> None:
    answer = send(case.manifest(NAMESPACE))
    assert answer.code in {400, 422}, answer.body
    where = str(case.reject)
    if answer.code == 400:  # an unknown field, in strict mode
        assert f'unknown field "{where}"' in answer.body["message"]
        return
    found = answer.mistakes
    if where == "metadata.name":  # rules at the root have no field, and DNS rules come first
        assert any(case.says in message for message in found.values()), found
        return
    near = [
        message
        for field, message in found.items()
        if field == where or field.startswith((f"{where}[", f"{where}."))
    ]
    assert near, found
    assert any(case.says in message for message in near), found


def test_unknown_fields_are_pruned_when_the_client_is_not_strict(send: Send) -> None:
    manifest = {**cases()[0].manifest(NAMESPACE)}
    manifest["spec"]["template"] = {"spec": {"hostPID": True}}
    manifest["spec"]["engine"] = {"command": ["sh"]}
    stored = send(manifest, validation="Ignore").body["spec"]
    assert "template" not in stored
    assert "command" not in stored["engine"]


def test_all_mistakes_of_one_kind_are_reported_at_once(send: Send) -> None:
    manifest = cases()[0].manifest(NAMESPACE)
    manifest["spec"] |= {
        "scaling": {"minReplicas": 9},
        "rollout": {"maxSurge": 0},
        "batching": {"minTokens": 9000},
    }
    assert set(send(manifest).mistakes) == {
        "spec.scaling.maxReplicas",
        "spec.rollout.maxSurge",
        "spec.batching.maxTokens",
    }


def test_scale_and_status_are_subresources(control_plane: ControlPlane, send: Send) -> None:
    """kubectl scale sets spec.replicas; a status write leaves the spec alone and the reverse."""
    manifest = cases()[0].manifest(NAMESPACE)
    manifest["metadata"]["name"] = "scaled"
    manifest["status"] = {"url": "http://elsewhere"}
    assert send(manifest, keep=True).code == 201

    def run(*words: str) -> str:
        return control_plane.kubectl("-n", NAMESPACE, *words)

    created = json.loads(run("get", "fis", "scaled", "-o", "json"))
    assert created["status"] == UNWRITTEN_STATUS
    run("scale", "fis/scaled", "--replicas=5")
    status = {
        "replicas": 3,
        "selector": "fleetkeeper.io/service=scaled,fleetkeeper.io/component=engine",
        "summary": {"ready": "3/5", "breaker": "batch open"},
        "scaling": {"desired": 5},
        "batching": {"sequences": 96, "tokens": 4096},
        "engine": {"profile": "cuda-0.32.0-1"},
        "url": "http://scaled.crd-cases.svc:80/v1",
    }
    run(
        "patch", "fis/scaled", "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": status, "spec": {"replicas": 9}}),
    )  # fmt: skip
    live = json.loads(run("get", "fis", "scaled", "-o", "json"))
    assert (live["spec"]["replicas"], live["status"]) == (5, {**UNWRITTEN_STATUS, **status})
    scale = control_plane.get(
        f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}/scaled/scale"
    )
    assert scale is not None
    assert scale["spec"] == {"replicas": 5}
    assert scale["status"] == {"replicas": 3, "selector": status["selector"]}
    wide = run("get", "fis", "scaled", "-o", "wide").splitlines()
    assert wide[0].split() == (
        [
            "NAME",
            "READY",
            "WANTED",
            "SUSPEND",
            "SEQUENCES",
            "TOKENS",
            "BREAKER",
            "AGE",
            "REASON",
            "DEGRADED",
            "AVAILABLE",
            "QUEUE-WAIT-MS",
            "BATCH-TIME-MS",
            "ENGINE",
            "URL",
        ]
    )
    for word in ("3/5", "96", "4096", "batch open", "500", "cuda-0.32.0-1", status["url"]):
        assert str(word) in wide[1]
    assert "ENGINE" not in run("get", "fis", "scaled")


def test_a_status_condition_is_held_to_its_shape(control_plane: ControlPlane, send: Send) -> None:
    manifest = cases()[0].manifest(NAMESPACE)
    manifest["metadata"]["name"] = "judged"
    assert send(manifest, keep=True).code == 201
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": "ImagePull",
        "message": "x" * 256,
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }

    def patch(**change: object) -> None:
        control_plane.kubectl(
            "-n", NAMESPACE, "patch", "fis/judged", "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": {"conditions": [{**condition, **change}]}}),
        )  # fmt: skip

    patch()
    for change in (
        {"status": "Maybe"},
        {"message": "x" * 257},
        {"reason": "image pull"},
        {"lastTransitionTime": "yesterday"},
    ):
        with pytest.raises(Exception, match="invalid"):
            patch(**change)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("fis", ["fleet of vLLM engines"]),
        ("fis.spec", ["stops changing child objects", "kubectl scale, HPA, or KEDA", "batching"]),
        (
            "fis.spec.batching",
            ["From 64 to 1048576. Default: 8192.", "limit of tokens in an engine step"],
        ),
        ("fis.spec.objectives", ["in milliseconds", "Default: 500."]),
        ("fis.spec.rollout.strategy", ["ENUM:", "Surge", "Default: Auto."]),
        ("fis.status.conditions", ["lastTransitionTime", "MemoryWithinCap"]),
    ],
)
def test_kubectl_explain_shows_unit_bounds_and_default(
    control_plane: ControlPlane, send: Send, field: str, words: list[str]
) -> None:
    text = " ".join(control_plane.kubectl("explain", field).split())
    missing = [word for word in words if word not in text]
    assert missing == []


ORDINARY_QUANTITIES = """
    0 1 2 4 10 100 1000 1024 1500 2048 1023 1025 1.0 1.5 0.5 0.1 0.001 .5 0.0001 1e3 100e3 15e2 1e-3
    1.5e3 12e6 1k 1000k 1500k 1M 1.5M 1G 1000G 1T 1P 1E 500m 1500m 1000m 100u 1000u 5n 1000n 0.5n 1Ki
    1Mi 1Gi 1Ti 1Pi 1Ei 1024Ki 1024Mi 1536Mi 0.5Gi 0.1Gi 1.5Gi 3.14Gi 1000Ki 1000Mi 2048Ki 0.5Ki
    0.25Ki 1.25Ki 0Gi 0m 64Gi 137438953472 4294967296 1000000 123456789 123456789k
    9223372036854775807 1.999999999Gi 100Mi 7.5
"""
QUANTITIES = tuple(ORDINARY_QUANTITIES.split())
ODD_QUANTITIES = ("5.", "01", "1E3", "+1", "+1Gi", "007Mi", "1.50Gi", "000", "0.0")


def written_by_server(control_plane: ControlPlane, texts: tuple[str, ...]) -> list[str]:
    """The texts as the API server holds them in a typed field of an object."""
    volumes = [
        {"name": f"v{index}", "emptyDir": {"sizeLimit": text}} for index, text in enumerate(texts)
    ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "quantities"},
        "spec": {"containers": [{"name": "c", "image": "x"}], "volumes": volumes},
    }
    answer = control_plane.kubectl(
        "-n", NAMESPACE, "create", "--dry-run=server", "-o", "json", "-f", "-", input=json.dumps(pod)
    )  # fmt: skip
    held = {volume["name"]: volume for volume in json.loads(answer)["spec"]["volumes"]}
    return [held[f"v{index}"]["emptyDir"]["sizeLimit"] for index in range(len(texts))]


def test_quantities_are_written_as_the_server_writes_them(
    control_plane: ControlPlane, send: Send
) -> None:
    theirs = dict(zip(QUANTITIES, written_by_server(control_plane, QUANTITIES), strict=True))
    assert {text: canonical_quantity(text) for text in QUANTITIES} == theirs


def test_the_server_leaves_a_canonical_quantity_as_it_is(
    control_plane: ControlPlane, send: Send
) -> None:
    """Odd forms too: what we apply is what is read back, so nothing seems changed."""
    ours = tuple(canonical_quantity(text) for text in (*QUANTITIES, *ODD_QUANTITIES))
    assert tuple(written_by_server(control_plane, ours)) == ours
    theirs = written_by_server(control_plane, ODD_QUANTITIES)
    assert [parse_quantity(text) for text in ODD_QUANTITIES] == [
        parse_quantity(text) for text in theirs
    ]
