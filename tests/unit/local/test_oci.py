"""Layers and images are the same for the same content, and hold nothing of this machine."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.images import oci

pytestmark = pytest.mark.exhaustive

needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")


def _tree(root: Path) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("a")
    (root / "sub" / "b.txt").write_text("b")
    (root / "sub" / "private").write_text("c")
    (root / "sub" / "private").chmod(0o600)
    return root


def _members(layer: oci.Layer) -> dict[str, tarfile.TarInfo]:
    plain = subprocess.run(["zstd", "-dc", layer.path], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        return {member.name: member for member in archive.getmembers()}


@needs_zstd
def test_the_same_content_gives_the_same_digest_whenever_and_wherever_it_is_packed(
    tmp_path: Path,
) -> None:
    """Times, owners and places do not enter the digest: an unchanged layer is never pushed again."""
    one, two = _tree(tmp_path / "one"), _tree(tmp_path / "deeper" / "two")
    os.utime(two / "a.txt", (1, 1))
    first = oci.write_layer(one, "opt/x", tmp_path / "1")
    second = oci.write_layer(two, "opt/x", tmp_path / "2")
    assert (first.digest, first.diff_id) == (second.digest, second.diff_id)
    (two / "a.txt").write_text("changed")
    assert oci.write_layer(two, "opt/x", tmp_path / "3").digest != first.digest


@needs_zstd
def test_a_layer_lies_under_its_prefix_is_readable_by_all_and_leaves_out_what_it_is_told(
    tmp_path: Path,
) -> None:
    """A pod with any user can read every file; none has an owner or a time of this machine."""
    layer = oci.write_layer(_tree(tmp_path / "t"), "opt/x", tmp_path / "1", exclude=("b.txt",))
    members = _members(layer)
    assert {name for name in members if members[name].isfile()} == {
        "opt/x/a.txt",
        "opt/x/sub/private",
    }
    assert all(member.mode & 0o444 == 0o444 for member in members.values())
    assert {(m.uid, m.gid, m.mtime) for m in members.values()} == {(0, 0, 0)}


@needs_zstd
def test_a_root_file_system_keeps_its_rights(tmp_path: Path) -> None:
    """A /tmp that everybody may write to stays one."""
    root = tmp_path / "root"
    (root / "tmp").mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    layer = oci.write_layer(root, "", tmp_path / "1", keep_rights=True)
    assert _members(layer)["./tmp"].mode == 0o1777


@needs_zstd
def test_an_image_holds_the_bases_layers_first_and_what_it_does_not_say_is_the_bases(
    tmp_path: Path,
) -> None:
    """Layers, diff ids and history agree in number; environment and entrypoint are merged."""
    low = oci.write_layer(_tree(tmp_path / "low"), "", tmp_path / "l1")
    high = oci.write_layer(_tree(tmp_path / "high"), "opt", tmp_path / "l2")
    base = oci.write_image(
        tmp_path / "base", [low], oci.ImageConfig(command=["sh"], env={"PATH": "/bin", "A": "1"})
    )
    config = oci.ImageConfig(entrypoint=["/x"], user="1", env={"A": "2"})
    layout = oci.write_image(tmp_path / "image", [high], config, base=base)

    def blob(digest: str) -> dict[str, object]:
        document: dict[str, object] = json.loads(
            (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_text()
        )
        return document

    manifest = blob(oci.image_digest(layout))
    layers = manifest["layers"]
    assert isinstance(layers, list)
    assert [layer["digest"] for layer in layers] == [low.digest, high.digest]
    assert isinstance(manifest["config"], dict)
    settings = blob(manifest["config"]["digest"])
    assert settings["rootfs"] == {"type": "layers", "diff_ids": [low.diff_id, high.diff_id]}
    assert isinstance(settings["history"], list)
    assert len(settings["history"]) == 2
    assert settings["config"] == {
        "Entrypoint": ["/x"],
        "Cmd": ["sh"],
        "User": "1",
        "Env": ["PATH=/bin", "A=2"],
        "Labels": {},
    }


@needs_zstd
def test_a_folder_that_cannot_be_packed_is_an_error_and_leaves_no_layer(tmp_path: Path) -> None:
    """A failed tar is never taken for a short layer."""
    with pytest.raises(LocalError, match="packing"):
        oci.write_layer(tmp_path / "absent", "", tmp_path / "out" / "1")
    assert list((tmp_path / "out").iterdir()) == []
