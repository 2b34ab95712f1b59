"""A release into a real registry: everything is by digest, present, and installable from there."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from typer.testing import CliRunner

from fleetkeeper.adapters.registry.client import Registry
from fleetkeeper.cli import app
from fleetkeeper_contract.version import VERSION
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.images import builder, registry
from fleetkeeper_local.release import references, sbom
from fleetkeeper_local.release.publish import Release, publish
from setup import WORKSPACE
from tests.support.chart.helm_chart import NAMESPACE, RELEASE, helm
from tests.support.chart.release_world import UPSTREAM, World, released, running_registry, stand_in

NEXT = "0.1.1"
BY_DIGEST = re.compile(r"[\w.:/-]+@sha256:[0-9a-f]{64}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with released(tmp_path_factory) as found:
        yield found


def _chart(world: World) -> str:
    return f"oci://{world.release.charts}/fleetkeeper"


def _without_hashes(text: str) -> str:
    """Return rendered objects without the hash of the settings, which contain names of images."""
    return re.sub(r"(settings: )[0-9a-f]{64}\b", r"\1", text)


def _rendered(*chart: str, values: dict[str, object] | None = None) -> str:
    """Return the chart with every component, so that it names all images."""
    options = ["--namespace", NAMESPACE, "--kube-version=1.36.3", "--plain-http"]
    options.append("--set=gateway.enabled=true,simulatedEngines=true")
    return helm("template", RELEASE, *chart, *options, values=values)


@pytest.mark.promise("release-by-digest")
def test_every_image_of_the_installed_chart_is_by_digest_and_in_the_registry(world: World) -> None:
    text = _rendered(_chart(world), f"--version={VERSION}")
    named = re.findall(r"(?im)^[ -]*\"?(?:\w*image)\"?: *\"?([^\s\",]+)", text)
    assert named
    assert [name for name in named if not BY_DIGEST.fullmatch(name)] == []
    assert set(BY_DIGEST.findall(text)) == set(world.images)
    for name in world.images:
        argv = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}"]
        manifest = subprocess.run(argv, capture_output=True, check=True).stdout
        assert name.endswith(f"@sha256:{hashlib.sha256(manifest).hexdigest()}")
    repositories = {references.without_tag(name).rpartition("/")[2] for name in world.images}
    assert repositories == {*builder.PUBLISHED.values(), "vllm-openai"}


@pytest.mark.exhaustive
def test_what_this_version_is_called_and_what_the_chart_names_are_the_same_image(
    world: World,
) -> None:
    for published in builder.PUBLISHED.values():
        tagged = f"{world.release.registry}/{published}:{VERSION}"
        assert references.by_digest(tagged) in world.images


@pytest.mark.exhaustive
def test_the_files_have_the_checksums_and_name_the_images_and_the_chart(
    world: World, tmp_path: Path
) -> None:
    folder = world.release.target
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    listed = {line.split("  ")[1] for line in sums}
    assert listed == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=folder, check=True)
    assert (folder / "images.txt").read_text().split() == world.images
    assert "The first version." in (folder / "NOTES.md").read_text()
    wheels = [
        ZipFile(folder / name) for name in listed if name.endswith(f"-{VERSION}-py3-none-any.whl")
    ]
    assert len(wheels) == len(WORKSPACE)
    assert not [wheel for wheel in wheels if wheel.testzip()]
    # The chart pulled by its digest is the file that the checksums cover.
    reference = (folder / "chart.txt").read_text().strip()
    helm("pull", reference, f"--destination={tmp_path}", "--plain-http")
    (pulled,) = tmp_path.iterdir()
    assert _rendered(reference) == _rendered(_chart(world), f"--version={VERSION}")
    assert pulled.read_bytes() == (folder / f"fleetkeeper-{VERSION}.tgz").read_bytes()


@pytest.mark.exhaustive
def test_each_image_of_this_release_has_an_sbom_as_a_file_and_in_the_registry(
    world: World,
) -> None:
    folder = world.release.target
    assert {path.name for path in folder.glob("*.cdx.json")} == {
        f"{published}.cdx.json" for published in builder.PUBLISHED.values()
    }
    for image in world.images:
        if UPSTREAM.partition(":")[0] in image:
            continue
        path = folder / sbom.file_name(image)
        document = json.loads(path.read_text())
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text()) is None
        (name,) = (n for n, published in builder.PUBLISHED.items() if f"/{published}@" in image)
        assert [part["purl"] for part in document["components"]] == [f"pkg:pypi/{name}-package@1.0"]
        about = PackageURL.from_string(document["metadata"]["component"]["purl"])
        assert f"{about.qualifiers['repository_url']}@{about.version}" == image
        # The registry has no list of referrers, so the list is an index under a tag.
        plain, _, digest = image.partition("@")
        (listed,) = _raw(f"{plain}:{digest.replace(':', '-')}")["manifests"]
        assert listed["artifactType"] == sbom.MEDIA_TYPE
        artifact = _raw(f"{plain}@{listed['digest']}")
        assert artifact["subject"]["digest"] == digest
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        assert [layer["digest"] for layer in artifact["layers"]] == [f"sha256:{content}"]


def _raw(name: str) -> dict[str, Any]:
    argv = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}"]
    found: dict[str, Any] = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return found


@pytest.mark.exhaustive
def test_the_chart_keeps_its_comments_and_all_other_values(world: World) -> None:
    before = (world.checkout.root / "charts/fleetkeeper/values.yaml").read_text()
    after = helm("show", "values", str(world.release.target / f"fleetkeeper-{VERSION}.tgz"))
    changed = [
        (old, new)
        for old, new in zip(before.splitlines(), after.rstrip("\n").splitlines(), strict=True)
        if old != new
    ]
    assert len(changed) == len(world.images) + 1
    assert all(re.search("[iI]mage|repository|digest", old) for old, _ in changed)


@pytest.mark.exhaustive
def test_a_mirror_keeps_the_digests_and_the_chart_runs_from_it(
    world: World, tmp_path: Path
) -> None:
    """The printed values change the registry of every image, and nothing else of the chart."""
    with running_registry(tmp_path) as port:
        mirror = f"127.0.0.1:{port}/mirror"
        arguments = ["mirror", f"--from={world.release.target}", f"--to={mirror}"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.stderr
        origin = world.release.registry.partition("/")[0]
        chart = (f"oci://{mirror}/fleetkeeper/charts/fleetkeeper", f"--version={VERSION}")
        assert f"helm install fleetkeeper {chart[0]} --version {VERSION} " in done.stderr
        before = _rendered(_chart(world), f"--version={VERSION}")
        after = _rendered(*chart, values=yaml.safe_load(done.stdout))
        expected = before.replace(f"{origin}/", f"{mirror}/")
        assert _without_hashes(after) == _without_hashes(expected)
        named = set(BY_DIGEST.findall(after))
        assert named == {image.replace(f"{origin}/", f"{mirror}/") for image in world.images}
        for name in named:
            assert references.exists(name)
        # The chart has the digest of the release too.
        (digest,) = re.findall(r"@.*", (world.release.target / "chart.txt").read_text())
        assert references.exists(f"{mirror}/fleetkeeper/charts/fleetkeeper{digest}")


@pytest.mark.exhaustive
def test_a_mirror_of_a_mirror_needs_no_access_to_the_registry_of_the_release(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where nothing reaches both registries: a registry on a disk that is carried over."""
    files = tmp_path / "files"
    files.mkdir()
    for name in ("images.txt", "chart.txt"):
        shutil.copy(world.release.target / name, files)
    origin = world.release.registry.partition("/")[0]
    argv = ["mirror", f"--from={files}"]
    with running_registry(tmp_path / "a") as carried, running_registry(tmp_path / "b") as last:
        first = CliRunner().invoke(app, [*argv, f"--to=127.0.0.1:{carried}/disk"])
        assert first.exit_code == 0, first.stderr
        ask = Registry._send

        async def send(self: Registry, method: str, url: Any, *rest: Any) -> Any:
            assert url.authority != origin, "the registry of the release was asked"
            return await ask(self, method, url, *rest)

        monkeypatch.setattr(Registry, "_send", send)
        via, to = f"--via=127.0.0.1:{carried}/disk", f"127.0.0.1:{last}"
        second = CliRunner().invoke(app, [*argv, via, f"--to={to}"])
        assert second.exit_code == 0, second.stderr
        assert second.stdout == first.stdout.replace(f"127.0.0.1:{carried}/disk", to)
        for image in world.images:
            assert references.exists(image.replace(origin, to))


@pytest.mark.exhaustive
def test_a_released_version_is_not_published_again(world: World) -> None:
    with pytest.raises(LocalError, match=r"this version is released"):
        publish(world.release)


@pytest.mark.exhaustive
def test_a_later_release_keeps_the_engines_of_the_earlier_and_refuses_to_change_them(
    world: World,
) -> None:
    """Neither an own image with another tag nor an upstream tag that moved gets into a profile."""
    upstream = world.release.upstream[UPSTREAM]
    (pinned,) = (name for name in world.images if "vllm-openai" in name)
    world.checkout.become(NEXT)
    world.content("second")
    later = Release(world.checkout.root, NEXT, world.release.registry, world.release.upstream)

    registry.copy(stand_in("vllm", "2", world.scratch).source, upstream, tls=False)
    with pytest.raises(LocalError, match=r"cuda-0\.32\.0-1\.image was .*--upstream"):
        publish(later)
    kept = Release(later.root, NEXT, later.registry, {UPSTREAM: pinned})
    values = "charts/fleetkeeper/values.yaml"
    engine = "fleetkeeper-engine-cpu:"
    world.checkout.edit(values, engine + VERSION, engine + NEXT)
    world.checkout.commit()
    with pytest.raises(LocalError, match=r"cpu-0\.32\.0-1\.image was"):
        publish(kept)
    assert not references.exists(f"{later.charts}/fleetkeeper:{NEXT}")

    world.checkout.edit(values, engine + NEXT, engine + VERSION)
    world.checkout.commit()
    engines = {name for name in world.images if "fleetkeeper-engine" in name or name == pinned}
    assert len(engines) == 4  # ours for CPU, GPU and simulated engines, and vLLM's
    images = set(publish(kept))
    assert images & set(world.images) == engines
    assert references.exists(f"{later.charts}/fleetkeeper:{NEXT}")
