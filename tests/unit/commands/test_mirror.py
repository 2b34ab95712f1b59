"""What `fleetkeeper mirror` refuses before it asks a registry, and the values that it prints."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from fleetkeeper.adapters.registry.client import OCI_MANIFEST_TYPE, Manifest
from fleetkeeper.adapters.registry.copying import Content, Copier
from fleetkeeper.adapters.registry.names import Place, Reference, digest_of
from fleetkeeper.cli import app
from fleetkeeper.commands import mirror

DIGEST = f"sha256:{'a' * 64}"
IMAGE = f"r.example.com/o/fleetkeeper@{DIGEST}"


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["mirror", *arguments])


@pytest.mark.parametrize(
    ("images", "chart", "code", "message"),
    [
        ("", None, 64, "names no image"),
        ("r.example.com/a:1\n", None, 64, "images.txt:1: 'r.example.com/a:1'"),
        (f"{IMAGE}\n\na@{DIGEST}\n", None, 64, "images.txt:3: "),
        (IMAGE, "", 64, "chart.txt is not one line"),
        (IMAGE, f"oci://r.example.com/charts/fleetkeeper@{DIGEST}", 64, "chart.txt is not one"),
    ],
)
def test_a_list_that_is_not_of_a_release_is_refused_with_its_line(
    tmp_path: Path, images: str, chart: str | None, code: int, message: str
) -> None:
    (tmp_path / "images.txt").write_text(images)
    if chart is not None:
        (tmp_path / "chart.txt").write_text(chart)
    done = _run(f"--from={tmp_path}", "--to=m.example.com")
    assert (done.exit_code, message in done.stderr) == (code, True), done.stderr


def test_a_directory_without_a_list_is_named(tmp_path: Path) -> None:
    done = _run(f"--from={tmp_path}", "--to=m.example.com")
    assert done.exit_code == 66
    assert str(tmp_path / "images.txt") in done.stderr


def test_a_target_with_a_scheme_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_text(IMAGE)
    done = _run(f"--from={tmp_path}", "--to=https://m.example.com")
    assert (done.exit_code, "no scheme" in done.stderr) == (2, True)


def test_a_registry_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_text(f"127.0.0.1:1/a@{DIGEST}")
    done = _run(f"--from={tmp_path}/images.txt", "--to=m.example.com")
    assert done.exit_code == 1
    assert "http://127.0.0.1:1/v2/a/manifests/" in done.stderr
    assert "check the name of the registry and the network" in done.stderr


VALUES = {
    "image": {"repository": "r.example.com/o/fleetkeeper", "tag": "", "digest": DIGEST},
    "router": {"image": f"r.example.com/o/router@{DIGEST}", "cpu": "1"},
    "engineProfiles": {
        "cuda-1": {
            "image": f"docker.io/vllm/vllm-openai@{DIGEST}",
            "injectedImage": f"r.example.com/o/engine@{DIGEST}",
            "contract": 1,
        }
    },
}
NAMES = (
    IMAGE,
    f"r.example.com/o/router@{DIGEST}",
    f"docker.io/vllm/vllm-openai@{DIGEST}",
    f"r.example.com/o/engine@{DIGEST}",
)


def test_values_name_every_image_in_the_other_registry_and_nothing_else() -> None:
    images = [Reference.parse(name) for name in NAMES]
    assert mirror._renamed(VALUES, images, Place.parse("m.example.com:5000/x")) == {
        "image": {"repository": "m.example.com:5000/x/o/fleetkeeper"},
        "router": {"image": f"m.example.com:5000/x/o/router@{DIGEST}"},
        "engineProfiles": {
            "cuda-1": {
                "image": f"m.example.com:5000/x/vllm/vllm-openai@{DIGEST}",
                "injectedImage": f"m.example.com:5000/x/o/engine@{DIGEST}",
            }
        },
    }


@pytest.mark.parametrize("missing", NAMES)
def test_an_image_of_the_chart_that_was_not_listed_is_an_error(
    missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the values would name an image that is not in the mirror."""
    images = [Reference.parse(name) for name in NAMES if name != missing]
    with pytest.raises(typer.Exit):
        mirror._renamed(VALUES, images, Place.parse("m.example.com"))
    assert missing in capsys.readouterr().err


def test_a_chart_that_is_not_ours_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the first key that it does not have would end the command with a traceback."""
    for archive, message in (
        (_chart({"other/values.yaml": b""}), "cannot read the values of"),
        (b"no archive", "cannot read the values of"),
        (_chart({"fleetkeeper/values.yaml": b"a: b"}), "is not the chart of Fleetkeeper"),
    ):
        manifest = {"layers": [{"mediaType": mirror.CHART_LAYER, "digest": digest_of(archive)}]}
        stored = Manifest(json.dumps(manifest).encode(), OCI_MANIFEST_TYPE)
        chart = Reference("r.example.com", "o/fleetkeeper", stored.digest, "1.0.0")
        with pytest.raises(typer.Exit):
            asyncio.run(mirror._chart_values(_Copier(archive), chart, Content([stored])))
        assert message in capsys.readouterr().err


def _chart(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


class _Copier(Copier):
    """A copier whose registry has this blob."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def read_blob(self, source: Reference, digest: str) -> bytes:  # noqa: ARG002
        return self._content
