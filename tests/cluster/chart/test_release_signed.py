"""A signed release: cosign accepts what was released, here and in a mirror, and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetkeeper.cli import app
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.control_plane.programs import program_path
from fleetkeeper_local.images import registry
from fleetkeeper_local.release import references
from fleetkeeper_local.release.publish import publish
from fleetkeeper_local.release.sign import Signer
from tests.support.chart.release_world import UPSTREAM, World, released, running_registry, stand_in

pytestmark = pytest.mark.exhaustive  # cosign takes four minutes of a core to build
PASSWORD = "a password"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new pair of keys."""
    folder = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSIGN_PASSWORD", PASSWORD)
        _cosign("generate-key-pair", f"--output-key-prefix={folder / 'cosign'}")
        yield folder / "cosign.key"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Iterator[World]:
    with released(tmp_path_factory, Signer(str(key))) as found:
        yield found


def _cosign(*arguments: str) -> None:
    argv = [str(program_path("cosign")), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalError(done.stderr.strip())


def _verify(world: World, name: str) -> None:
    """Verify as docs/releases.md says, with the key of the release page."""
    key = world.release.target / "cosign.pub"
    _cosign("verify", f"--key={key}", "--insecure-ignore-tlog=true", name)


def _chart(world: World) -> str:
    named = (world.release.target / "chart.txt").read_text().strip().removeprefix("oci://")
    return f"{references.without_tag(named)}@{named.partition('@')[2]}"


def _ours(world: World) -> list[str]:
    return [image for image in world.images if UPSTREAM.partition(":")[0] not in image]


def test_images_and_chart_of_the_release_are_signed_by_its_key(world: World, key: Path) -> None:
    assert len(_ours(world)) == 6
    for name in (*_ours(world), _chart(world)):
        _verify(world, name)
    assert (world.release.target / "cosign.pub").read_bytes() == (
        key.with_suffix(".pub").read_bytes()
    )


def test_an_image_that_was_not_released_is_not_accepted(world: World, tmp_path: Path) -> None:
    """Neither an image of another party nor one that took the place of ours under its tag."""
    (upstream,) = set(world.images) - set(_ours(world))
    with pytest.raises(LocalError, match="no signatures found"):
        _verify(world, upstream)
    place = references.without_tag(_ours(world)[0])
    registry.copy(stand_in("bad", "bad", tmp_path).source, f"{place}:bad", tls=False)
    other = references.by_digest(f"{place}:bad")
    with pytest.raises(LocalError, match="no signatures found"):
        _verify(world, other)
    # The list of what refers to an image can be forged; the signature is about the digest.
    signed = f"{place}:{_ours(world)[0].partition('@')[2].replace(':', '-')}"
    forged = f"{place}:{other.partition('@')[2].replace(':', '-')}"
    argv = ["skopeo", "copy", "--all", "--insecure-policy", "--quiet", "--src-tls-verify=false"]
    argv += ["--dest-tls-verify=false", f"docker://{signed}", f"docker://{forged}"]
    subprocess.run(argv, check=True, capture_output=True)
    with pytest.raises(LocalError, match=r"digest|signature"):
        _verify(world, other)


def test_another_key_is_not_accepted(world: World, tmp_path: Path) -> None:
    _cosign("generate-key-pair", f"--output-key-prefix={tmp_path / 'other'}")
    key = tmp_path / "other.pub"
    with pytest.raises(LocalError, match="signature"):
        _cosign("verify", f"--key={key}", "--insecure-ignore-tlog=true", _ours(world)[0])


def test_the_checksums_are_signed_and_a_changed_list_is_not_accepted(
    world: World, tmp_path: Path
) -> None:
    folder = world.release.target
    verify = ("verify-blob", f"--key={folder / 'cosign.pub'}", "--insecure-ignore-tlog=true")
    bundle = f"--bundle={folder / 'SHA256SUMS.sigstore.json'}"
    _cosign(*verify, bundle, str(folder / "SHA256SUMS"))
    listed = (folder / "SHA256SUMS").read_text()
    assert all(name in listed for name in ("cosign.pub", "images.txt", "fleetkeeper.cdx.json"))
    changed = tmp_path / "SHA256SUMS"
    changed.write_text(listed.replace("images.txt", "other.txt"))
    with pytest.raises(LocalError, match="signature"):
        _cosign(*verify, bundle, str(changed))


def test_a_mirror_has_the_signatures_and_sboms_too(world: World, tmp_path: Path) -> None:
    with running_registry(tmp_path) as port:
        mirror = f"127.0.0.1:{port}/mirror"
        done = CliRunner().invoke(
            app, ["mirror", f"--from={world.release.target}", f"--to={mirror}"]
        )
        assert done.exit_code == 0, done.stderr
        assert done.stderr.count("attached artifacts: 2") == len(_ours(world))
        origin = world.release.registry.partition("/")[0]
        for name in (*_ours(world), _chart(world)):
            _verify(world, name.replace(f"{origin}/", f"{mirror}/"))


def test_a_key_that_cannot_be_used_fails_before_anything_is_published(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    world.checkout.become("0.1.1")
    # Nothing is built: a build would be an unknown image.
    monkeypatch.setattr("fleetkeeper_local.images.builder.BUILDERS", {})
    release = world.release
    later = type(release)(release.root, "0.1.1", release.registry, release.upstream, release.signer)
    with pytest.raises(LocalError, match="COSIGN_PASSWORD"):
        publish(later)
    assert not [*release.target.glob("*.whl"), *release.target.glob("*.txt")]
