"""The package lists in the layers of a real image, as a container of it would see them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.images import oci
from fleetkeeper_local.release import contents
from tests.support.chart.release_world import require_programs

pytestmark = pytest.mark.exhaustive  # about the lists of packages that a release publishes
STATUS = "var/lib/dpkg/status"
LAYERS = (
    {
        STATUS: "old",
        "usr/lib/os-release": "ID=debian",
        "etc/passwd": "not a list",
        "opt/a/one-1.dist-info/METADATA": "one",
        "opt/a/two-1.dist-info/METADATA": "two",
        "opt/b/three-1.dist-info/METADATA": "three",
        "opt/b/four.egg-info/PKG-INFO": "four",
        "opt/bc/five-1.dist-info/METADATA": "five",
    },
    {
        STATUS: "new",
        "opt/a/.wh.one-1.dist-info": "",
        "opt/a/one-2.dist-info/METADATA": "one again",
        "opt/b/.wh..wh..opq": "",
        "opt/b/six-1.dist-info/METADATA": "six",
    },
)
SEEN = {
    STATUS: b"new",
    "usr/lib/os-release": b"ID=debian",
    "opt/a/one-2.dist-info/METADATA": b"one again",
    "opt/a/two-1.dist-info/METADATA": b"two",
    "opt/b/six-1.dist-info/METADATA": b"six",
    "opt/bc/five-1.dist-info/METADATA": b"five",
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image whose second layer replaces, removes and hides files of the first."""
    require_programs()
    layers = []
    for number, files in enumerate(LAYERS):
        for name, text in files.items():
            path = tmp_path / f"{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        layers.append(oci.write_layer(tmp_path / f"{number}", "", tmp_path / f"layer-{number}"))
    return oci.write_image(tmp_path / "layout", layers, oci.ImageConfig(command=["/none"]))


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_a_later_layer_replaces_and_removes(image: Path, tmp_path: Path, compression: str) -> None:
    other = tmp_path / "other"
    argv = ["skopeo", "copy", "--insecure-policy", "--quiet", "--dest-compress"]
    argv += [f"--dest-compress-format={compression}", f"oci:{image}:1", f"oci:{other}:1"]
    subprocess.run(argv, check=True, capture_output=True)
    (tmp_path / "scratch").mkdir()
    assert contents.read_lists(f"oci:{other}:1", tmp_path / "scratch") == SEEN


def test_an_image_that_does_not_exist_is_named(tmp_path: Path) -> None:
    require_programs()
    with pytest.raises(LocalError, match="none:1"):
        contents.read_lists(f"oci:{tmp_path}/none:1", tmp_path)


def test_a_damaged_layer_is_an_error(image: Path, tmp_path: Path) -> None:
    for blob in (image / "blobs/sha256").iterdir():
        if blob.read_bytes()[:4] == b"\x28\xb5\x2f\xfd":
            blob.write_bytes(blob.read_bytes()[:-20])
    (tmp_path / "scratch").mkdir()
    with pytest.raises(LocalError):
        contents.read_lists(f"oci:{image}:1", tmp_path / "scratch")
