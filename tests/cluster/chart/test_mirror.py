"""`fleetkeeper mirror` between two real registries: logins, failures, repetition, what refers to images."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner, Result

from fleetkeeper.adapters.registry import copying
from fleetkeeper.adapters.registry.client import INDEX_TYPES, MANIFEST_TYPES, Manifest, Registry
from fleetkeeper.adapters.registry.names import Reference, digest_of
from fleetkeeper.cli import app
from fleetkeeper_local.images import oci, registry
from fleetkeeper_local.release import references
from tests.support.chart.registry_front import PASSWORD, USER, Front, running_front
from tests.support.chart.release_world import require_programs, running_registry, stand_in

pytestmark = pytest.mark.exhaustive  # about the copying of a release, not about serving
OCI_MANIFEST = MANIFEST_TYPES[2]
SBOM = b'{"bomFormat": "CycloneDX"}'


@dataclass
class World:
    """A registry with two images, an empty one, both behind a front, and the list of the images."""

    source: Front
    target: Front
    folder: Path
    images: list[Reference] = field(default_factory=list)

    def mirror(self, *arguments: str, to: str = "mirror") -> Result:
        """Run the command."""
        place = f"127.0.0.1:{self.target.port}/{to}"
        return CliRunner().invoke(
            app, ["mirror", f"--from={self.folder}", f"--to={place}", *arguments]
        )

    def copies(self, to: str = "mirror") -> list[str]:
        """Return the names that the images have after a copy."""
        return [
            f"127.0.0.1:{self.target.port}/{to}/{image.repository}@{image.digest}"
            for image in self.images
        ]

    def log_in(self, host: str, password: str = PASSWORD) -> None:
        """Write a login for a registry."""
        path = self.folder / "auth.json"
        auths = json.loads(path.read_text())["auths"] if path.exists() else {}
        auths[host] = {"auth": base64.b64encode(f"{USER}:{password}".encode()).decode()}
        path.write_text(json.dumps({"auths": auths}))


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    require_programs()
    with (
        running_registry(tmp_path_factory.mktemp("from")) as source,
        running_registry(tmp_path_factory.mktemp("to")) as target,
    ):
        yield source, target


@pytest.fixture
def world(
    ports: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[World]:
    """Images with content of their own for each test, so that no test finds another one's blobs."""
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    monkeypatch.setattr(copying, "PAUSE_S", 0)
    with running_front(ports[0]) as source, running_front(ports[1]) as target:
        world = World(source, target, tmp_path)
        for name in ("one", "two"):
            image = stand_in(name, request.node.name, tmp_path)
            tagged = f"127.0.0.1:{ports[0]}/release/{name}:1"
            registry.copy(image.source, tagged, tls=False)
            found = references.by_digest(tagged)
            world.images.append(Reference.parse(found.replace(f":{ports[0]}/", f":{source.port}/")))
        (tmp_path / "images.txt").write_text("".join(f"{image}\n" for image in world.images))
        yield world


async def _put(host: str, repository: str, manifest: dict[str, Any], tag: str = "") -> str:
    """Store a manifest, and its blobs of which the content is known."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        there = Registry(session, host, plain_http=True)
        for content in (b"{}", SBOM):

            async def chunks(content: bytes = content) -> Any:
                yield content

            await there.put_blob(repository, digest_of(content), len(content), chunks())
        found = Manifest(json.dumps(manifest).encode(), manifest["mediaType"])
        await there.put_manifest(repository, tag or found.digest, found)
        return found.digest


def _artifact(subject: Reference, size: int) -> dict[str, Any]:
    empty = {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": digest_of(b"{}"),
        "size": 2,
    }
    layer = {
        "mediaType": "application/vnd.cyclonedx+json",
        "digest": digest_of(SBOM),
        "size": len(SBOM),
    }
    about = {"mediaType": OCI_MANIFEST, "digest": subject.digest, "size": size}
    return {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": "application/vnd.cyclonedx+json",
        "config": empty,
        "layers": [layer],
        "subject": about,
    }


def test_a_copy_has_the_digests_and_a_second_one_transfers_nothing(world: World) -> None:
    done = world.mirror()
    assert done.exit_code == 0, done.stderr
    for name in world.copies():
        assert references.exists(name)
    assert "[2/2]" in done.stderr
    assert done.stderr.count("digest verified") == 2
    assert world.target.sent_blobs() == 4  # a configuration and a layer each
    world.target.passed.clear()
    assert world.mirror().exit_code == 0
    assert world.target.sent_blobs() == 0


def test_a_copy_has_a_tag_so_that_no_registry_removes_it_as_unused(world: World) -> None:
    assert world.mirror().exit_code == 0
    for image, name in zip(world.images, world.copies(), strict=True):
        tagged = f"{references.without_tag(name)}:mirrored-{image.digest[7:23]}"
        assert references.by_digest(tagged) == name


def test_a_dry_run_says_what_is_missing_and_writes_nothing(world: World) -> None:
    done = world.mirror("--dry-run")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("2 of 2 blobs are missing") == 2
    assert {method for method, _ in world.target.passed} <= {"GET", "HEAD"}
    assert done.stdout == ""


@pytest.mark.parametrize("scheme", ["Basic", "Bearer"])
def test_logins_of_docker_and_skopeo_are_used(world: World, scheme: str) -> None:
    world.source.scheme = world.target.scheme = scheme
    for front in (world.source, world.target):
        world.log_in(f"127.0.0.1:{front.port}")
    done = world.mirror()
    assert done.exit_code == 0, done.stderr
    world.target.scheme = ""
    assert references.exists(world.copies()[0])
    if scheme == "Bearer":
        # A token for each repository and each right, not for each request.
        assert len(world.target.tokens) == len(set(world.target.tokens))
        assert "repository:mirror/release/one:pull,push" in world.target.tokens


@pytest.mark.parametrize("scheme", ["Basic", "Bearer"])
@pytest.mark.parametrize("password", ["", "wrong"])
def test_without_a_valid_login_the_message_names_the_registry_and_how_to_log_in(
    world: World, scheme: str, password: str
) -> None:
    world.target.scheme = scheme
    host = f"127.0.0.1:{world.target.port}"
    if password:
        world.log_in(host, password)
    done = world.mirror()
    assert done.exit_code == 1
    assert f"docker login {host}" in done.stderr
    assert PASSWORD not in done.stderr


def test_a_blob_that_is_not_what_its_digest_says_is_not_copied(world: World) -> None:
    def lie(method: str, path: str, answer: bytes) -> tuple[int, bytes] | None:
        wrong = bytes([answer[0] ^ 1]) + answer[1:] if answer else answer
        return (200, wrong) if method == "GET" and "/blobs/" in path else None

    world.source.falsify = lie
    done = world.mirror()
    assert done.exit_code == 1
    assert "do not use this registry" in done.stderr
    assert f"127.0.0.1:{world.source.port}/release/one sent" in done.stderr
    assert not references.exists(world.copies()[0])


def test_a_manifest_that_is_not_what_its_digest_says_is_not_copied(world: World) -> None:
    world.source.falsify = lambda method, path, answer: (
        (200, answer + b" ") if "/manifests/" in path and method == "GET" else None
    )
    done = world.mirror()
    assert done.exit_code == 1
    assert world.images[0].digest in done.stderr
    assert world.target.passed.total() == 0


def test_a_registry_that_stores_something_else_is_reported(world: World) -> None:
    world.target.falsify = lambda method, path, answer: (
        (200, answer + b" ") if "/manifests/" in path and method == "GET" else None
    )
    done = world.mirror()
    assert done.exit_code == 1
    assert f"127.0.0.1:{world.target.port} answered" in done.stderr


def test_a_failure_that_passes_is_tried_again(world: World) -> None:
    failures = iter([(503, b"busy", dict[str, str]())] * 2)
    world.target.refuse = lambda method, path: (
        next(failures, None) if method == "PUT" and "/uploads/" in path else None
    )
    done = world.mirror()
    assert done.exit_code == 0, done.stderr
    assert next(failures, None) is None
    assert references.exists(world.copies()[0])


def test_a_failure_that_stays_ends_the_copy_and_the_next_one_sends_only_the_rest(
    world: World,
) -> None:
    world.target.refuse = lambda method, path: (
        (503, b"busy", {})
        if method == "PUT" and "/manifests/" in path and "/two/" in path
        else None
    )
    done = world.mirror()
    assert done.exit_code == 1
    assert "HTTP status 503: busy" in done.stderr
    assert not references.exists(world.copies()[1])
    world.target.refuse = lambda *_: None
    world.target.passed.clear()
    assert world.mirror().exit_code == 0
    assert world.target.sent_blobs() == 0
    assert references.exists(world.copies()[1])


def test_a_login_that_ends_during_a_copy_is_renewed(world: World) -> None:
    world.target.scheme = "Bearer"
    host = f"127.0.0.1:{world.target.port}"
    world.log_in(host)
    ends = iter([True])

    def end(method: str, path: str) -> tuple[int, bytes, dict[str, str]] | None:
        if method != "PUT" or "/uploads/" not in path or not next(ends, False):
            return None
        return 401, b"{}", {"WWW-Authenticate": world.target.challenge(method, path)}

    world.target.refuse = end
    done = world.mirror()
    assert done.exit_code == 0, done.stderr
    assert next(ends, None) is None
    assert world.target.sent_blobs() == 4


def test_storage_to_which_a_registry_redirects_gets_no_login(
    world: World, ports: tuple[int, int]
) -> None:
    """Stores such as S3 refuse requests with two logins, and should not see this one."""
    world.source.scheme = "Bearer"
    world.log_in(f"127.0.0.1:{world.source.port}")
    with running_front(ports[0]) as storage:

        def redirect(method: str, path: str) -> tuple[int, bytes, dict[str, str]] | None:
            if method != "GET" or "/blobs/" not in path:
                return None
            return 307, b"", {"Location": f"http://127.0.0.1:{storage.port}{path}"}

        world.source.refuse = redirect
        done = world.mirror()
        assert done.exit_code == 0, done.stderr
        assert storage.passed.total() == 4
        assert storage.authorized == []
        assert world.source.authorized


def test_a_repository_that_a_registry_does_not_create_is_named(world: World) -> None:
    world.target.refuse = lambda method, _: (404, b"{}", {}) if method == "POST" else None
    done = world.mirror()
    assert done.exit_code == 1
    assert "has no repository mirror/release/one and does not create it" in done.stderr


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}"])
def test_a_token_server_that_answers_something_else_is_named(world: World, answer: bytes) -> None:
    world.target.scheme = "Bearer"
    host = f"127.0.0.1:{world.target.port}"
    world.log_in(host)
    world.target.token = answer
    done = world.mirror()
    assert done.exit_code == 1
    assert f"http://{host}/token" in done.stderr


def test_a_blob_that_two_images_share_is_sent_once(world: World) -> None:
    (folder,) = (p for p in world.folder.iterdir() if p.name.startswith("one-"))
    layer = oci.write_layer(folder / "files", "opt", folder / "layer")
    layout = oci.write_image(folder / "again", [layer], oci.ImageConfig(command=["/other"]))
    tagged = f"127.0.0.1:{world.source.port}/release/three:1"
    registry.copy(f"oci:{layout}:1", tagged, tls=False)
    (world.folder / "images.txt").write_text(f"{world.images[0]}\n{references.by_digest(tagged)}\n")
    done = world.mirror()
    assert done.exit_code == 0, done.stderr
    assert world.target.sent_blobs() == 3  # two configurations, one layer


def test_every_platform_of_an_index_is_copied(world: World) -> None:
    host = f"127.0.0.1:{world.source.port}"
    child = world.images[0]
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPES[0],
        "manifests": [{"mediaType": OCI_MANIFEST, "digest": child.digest, "size": 1}],
    }
    digest = asyncio.run(_put(host, child.repository, index))
    world.images[:] = [Reference(host, child.repository, digest)]
    (world.folder / "images.txt").write_text(f"{world.images[0]}\n")
    done = world.mirror(to="all")
    assert done.exit_code == 0, done.stderr
    (name,) = world.copies("all")
    assert references.exists(name)
    assert references.exists(name.replace(digest, child.digest))


def test_what_refers_to_an_image_is_copied_and_listed_beside_what_is_there(world: World) -> None:
    """Neither of the two registries lists referrers itself, so the list is an index under a tag."""
    image = world.images[0]
    host = f"127.0.0.1:{world.source.port}"
    about = asyncio.run(_put(host, image.repository, _artifact(image, 1)))
    listed = {"mediaType": OCI_MANIFEST, "digest": about, "size": 1, "artifactType": "a/sbom"}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPES[0], "manifests": [listed]}
    tag = image.digest.replace(":", "-")
    asyncio.run(_put(host, image.repository, index, tag))
    other = {**listed, "digest": asyncio.run(_put(host, "x", _artifact(image, 2)))}
    target = f"127.0.0.1:{world.target.port}"
    there = f"mirror/{image.repository}"
    asyncio.run(_put(target, there, _artifact(image, 2)))
    asyncio.run(_put(target, there, {**index, "manifests": [other]}, tag))
    for _ in range(2):
        done = world.mirror()
        assert done.exit_code == 0, done.stderr
        assert "attached artifacts: 1" in done.stderr
    assert references.exists(f"{target}/{there}@{about}")

    async def read() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session:
            found = Registry(session, target, plain_http=True)
            return await found.referrers(there, image.digest)

    assert asyncio.run(read()) == [other, listed]


def test_an_image_that_the_source_does_not_have_is_named(world: World) -> None:
    name = f"127.0.0.1:{world.source.port}/release/none@sha256:{'0' * 64}"
    (world.folder / "images.txt").write_text(f"{name}\n")
    done = world.mirror()
    assert done.exit_code == 1
    assert f"does not have release/none@sha256:{'0' * 64}" in done.stderr
