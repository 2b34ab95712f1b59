"""Distributions contain their own package, dependencies are locked, and there is one version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from fleetkeeper.api.profiles.defaults import default_catalog
from fleetkeeper.console.server import PAGES
from fleetkeeper_contract.version import VERSION
from setup import WORKSPACE

ROOT = Path(__file__).resolve().parents[3]
PUBLIC_REGISTRY = {"https://pypi.org/simple"}
PUBLIC_FILES = "https://files.pythonhosted.org/"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "package", "others"),
    [
        (".", "fleetkeeper", set()),
        ("contract", "fleetkeeper_contract", {"fleetkeeper_steps"}),
        ("engine_image", "fleetkeeper_engine", set()),
        ("gateway", "fleetkeeper_gateway", set()),
        ("kube", "fleetkeeper_kube", set()),
        ("local", "fleetkeeper_local", set()),
    ],
)
def test_a_wheel_contains_its_own_packages(
    project: str, package: str, others: set[str], tmp_path: Path
) -> None:
    """The operator's wheel, for one, has no local cluster."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    subprocess.run([*build, tmp_path], cwd=ROOT / project, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.startswith(f"{package}-{VERSION}-")
    files = ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in files} == {
        package,
        f"{package}-{VERSION}.dist-info",
        *others,
    }
    for name in (package, *others):
        assert f"{name}/py.typed" in files
    assert ("fleetkeeper_steps/hardware.json" in files) == ("fleetkeeper_steps" in others)
    data = ["simulate/report/templates/report.css", "simulate/report/templates/report.html"]
    data += [f"console/pages/{page}" for page in PAGES]
    for name in data:
        assert (f"fleetkeeper/{name}" in files) == (package == "fleetkeeper")


@pytest.mark.promise("images-without-local")
def test_no_image_is_made_of_the_local_cluster() -> None:
    """What .dockerignore does not allow is in no build's context."""
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert "operator" in allowed
    assert not [path for path in allowed if path.startswith("local")]
    files = [*ROOT.glob("*/Containerfile*")]
    assert len(files) > 1
    for file in files:
        assert not re.search(r"^COPY local", file.read_text(), re.MULTILINE), file


def test_the_operator_needs_neither_the_engine_nor_the_local_cluster() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {name for name in project["dependencies"] if name.startswith("fleetkeeper")}
    assert ours == {"fleetkeeper-contract", "fleetkeeper-kube"}
    contract = tomllib.loads((ROOT / "contract/pyproject.toml").read_text())["project"]
    assert contract["dependencies"] == []


def test_the_installer_knows_every_distribution() -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
    projects = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"]
        for folder in (".", *workspace["members"])
    ]
    assert sorted(projects) == sorted(WORKSPACE)


def test_access_to_kubernetes_brings_no_client_of_kubernetes_into_the_gateway() -> None:
    kube = tomllib.loads((ROOT / "kube/pyproject.toml").read_text())["project"]
    assert [name.partition(">")[0] for name in kube["dependencies"]] == ["aiohttp"]
    pinned = re.findall(
        r"^([\w.-]+)==", (ROOT / "requirements/gateway.txt").read_text(), re.MULTILINE
    )
    assert "aiohttp" in pinned
    assert not {"kopf", "kubernetes"} & set(pinned)


@pytest.mark.parametrize(
    ("project", "containerfile"),
    [
        (".", "operator/Containerfile"),
        ("gateway", "gateway/Containerfile"),
        ("engine_image", "engine_image/Containerfile.cpu"),
    ],
)
def test_an_image_is_built_with_the_packages_of_ours_that_it_needs(
    project: str, containerfile: str
) -> None:
    dependencies = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    ours = re.findall(r"fleetkeeper-(\w+)", " ".join(dependencies["dependencies"]))
    assert "contract" in ours
    text = (ROOT / containerfile).read_text()
    for folder in ours:
        assert f"COPY {folder} {folder}\n" in text
        assert re.search(rf"--wheel-dir /wheels .*\./{folder} ", text)
        assert f"!{folder}\n" in (ROOT / ".dockerignore").read_text()


def test_the_operator_image_has_no_client_of_the_batch_api() -> None:
    """It is an extra, for the machines of users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.split("[>=]", wanted)[0] for wanted in project["optional-dependencies"]["batch"]}
    pinned = re.findall(
        r"^([a-z0-9-]+)==", (ROOT / "requirements/operator.txt").read_text(), re.MULTILINE
    )
    assert extra == {"openai", "httpx2"}
    assert "typer" in pinned
    assert extra.isdisjoint(pinned)


@pytest.mark.promise("lock-pypi")
def test_the_lock_names_public_registries_alone_and_a_hash_for_every_file() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    assert {
        package["source"]["registry"] for package in packages if "registry" in package["source"]
    } == PUBLIC_REGISTRY
    for package in packages:
        for file in [*package.get("wheels", []), *filter(None, [package.get("sdist")])]:
            assert file["url"].startswith(PUBLIC_FILES), file
            assert file["hash"].startswith("sha256:"), file


def test_the_chart_has_the_version_of_the_distributions() -> None:
    chart = yaml.safe_load((ROOT / "charts/fleetkeeper/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_default_images_have_the_version_of_the_distributions() -> None:
    """A profile never changes, so a release adds profiles and points the aliases to them."""
    values = yaml.safe_load((ROOT / "charts/fleetkeeper/values.yaml").read_text())
    assert values["router"]["image"] == f"fleetkeeper-router:{VERSION}"
    assert values["gateway"]["image"] == f"fleetkeeper-gateway:{VERSION}"
    catalog = default_catalog()
    by_name = {profile.name: profile for profile in catalog.profiles}
    newest = [by_name[name] for name in catalog.aliases.values()]
    assert {profile.injected_image or profile.image for profile in newest} == {
        f"fleetkeeper-engine:{VERSION}",
        f"fleetkeeper-engine-cpu:{VERSION}",
    }


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_the_commands_to_install_name_this_version(page: str) -> None:
    words = r"(?:fleetkeeper[a-z-]*:|\$image:|--version |VERSION=)(\d+\.\d+\.\d+)"
    assert set(re.findall(words, (ROOT / page).read_text())) == {VERSION}
