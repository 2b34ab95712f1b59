"""The claims of SECURITY.md about pins, peers and rights hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fleetkeeper.reconcile.context import KUBE_DNS, default_context
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper_local.node.addons import desired_dns
from tests.support.docs_commands import ROOT
from tests.support.reconcile.random_specs import random_services

# -- what engines may call ---------------------------------------------------------------------------


@pytest.mark.promise("engine-egress")
def test_no_engine_of_any_service_may_call_any_address_on_a_port() -> None:
    """Every rule out of an engine names its peers, DNS too; the only wide one is HTTPS for hf://."""
    context = default_context()
    profile = context.catalog.resolve("cuda")
    for service in random_services(seed=53, count=100):
        for child in desired_children(service, profile, context, replicas=1):
            if child["kind"] != "NetworkPolicy" or not child["metadata"]["name"].endswith(
                "-engine"
            ):
                continue
            for rule in child["spec"]["egress"]:
                assert rule.get("to"), rule
                wide = [p for p in rule["to"] if p.get("ipBlock", {}).get("cidr") == "0.0.0.0/0"]
                assert not wide or [item["port"] for item in rule["ports"]] == [443]


def test_the_local_clusters_dns_is_among_the_default_peers() -> None:
    deployment = next(item for item in desired_dns("dns:1") if item["kind"] == "Deployment")
    pods, _ = KUBE_DNS.peers
    assert (
        deployment["metadata"]["namespace"] == pods.namespace_labels["kubernetes.io/metadata.name"]
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pods.pod_labels.items() <= labels.items()


# -- supply chain --------------------------------------------------------------------------------------


@pytest.mark.promise("python-pins")
@pytest.mark.parametrize(
    "file", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda file: file.name
)
def test_every_python_dependency_is_pinned_with_hashes(file: Path) -> None:
    joined = file.read_text().replace("\\\n", " ")
    pins = [
        line
        for line in joined.splitlines()
        if line.strip() and not line.startswith(("#", " ", "-"))
    ]
    assert pins
    for line in pins:
        assert re.match(r"[A-Za-z0-9._\[\],-]+(==| @ )", line), line
        assert "--hash=sha256:" in line, line


@pytest.mark.promise("go-pins")
def test_every_go_module_has_its_sums() -> None:
    modules = sorted((ROOT / "local").rglob("go.mod"))
    assert modules
    for module in modules:
        needs = re.search(r"^require|^\t", module.read_text(), re.MULTILINE)
        assert not needs or module.with_name("go.sum").exists(), module


@pytest.mark.promise("base-images")
def test_base_images_are_named_by_digest_but_for_two() -> None:
    by_tag = set()
    for file in [*ROOT.glob("engine_image/Containerfile*"), ROOT / "operator" / "Containerfile"]:
        (base,) = re.findall(r"^ARG BASE=(\S+)$", file.read_text(), re.MULTILINE)
        if "@sha256:" not in base:
            by_tag.add(base.rpartition("/")[2])
    assert by_tag == {"vllm-openai:v0.32.0", "python:3.12-slim-bookworm"}


@pytest.mark.promise("no-secrets")
def test_the_operator_names_no_secret_among_its_rights() -> None:
    """In the chart's text itself, whatever is rendered: the one right is that of the key job."""
    rules = (ROOT / "charts/fleetkeeper/templates/_helpers.tpl").read_text()
    section = rules.split('define "fleetkeeper.rules"')[1].split("{{- end -}}")[0]
    found = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", section.partition("-}}")[2]))
    assert len(found) > 5
    assert not [rule for rule in found if "secrets" in rule["resources"]]
