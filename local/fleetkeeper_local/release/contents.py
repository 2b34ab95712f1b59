"""The files of an image that list its packages, read from its layers without a container."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.shell import run

COPY_TIMEOUT_S = 1800.0
_LISTS = re.compile(
    r"var/lib/dpkg/status(?:\.d/[^/]+)?"
    r"|usr/lib/os-release"
    r"|(?:.*/)?[^/]+\.dist-info/METADATA"
    r"|(?:.*/)?[^/]+\.egg-info/PKG-INFO"
)
_HIDES, _HIDES_ALL = ".wh.", ".wh..wh..opq"
"""Names by which a layer removes a file of the layers below, or all of a directory (OCI image spec)."""


def read_lists(source: str, scratch: Path) -> dict[str, bytes]:
    """Return the package lists in an image's root file system, by path.

    Args:
        source: skopeo's name of the image.
        scratch: an empty directory with room for the image.

    Raises:
        LocalError: the image or one of its layers cannot be read.
    """
    argv = ("skopeo", "copy", "--insecure-policy", "--quiet", source, f"dir:{scratch}")
    run(*argv, timeout_s=COPY_TIMEOUT_S)
    files = dict[str, bytes]()
    for layer in json.loads((scratch / "manifest.json").read_text())["layers"]:
        with _opened(scratch / layer["digest"].partition(":")[2], layer["mediaType"]) as archive:
            files = _above(files, archive)
    return files


def _above(files: dict[str, bytes], archive: tarfile.TarFile) -> dict[str, bytes]:
    """Return the lists with those of the next layer, and without those that it removes."""
    new, hidden = dict[str, bytes](), set[str]()
    for member in archive:
        name = member.name.removeprefix("./").lstrip("/")
        folder, _, last = name.rpartition("/")
        if last == _HIDES_ALL:
            hidden.add(folder)
        elif last.startswith(_HIDES):
            hidden.add(f"{folder}/{last.removeprefix(_HIDES)}".lstrip("/"))
        elif member.isfile() and _LISTS.fullmatch(name):
            content = archive.extractfile(member)
            new[name] = content.read() if content else b""
    kept = {name: text for name, text in files.items() if not hidden & set(_prefixes(name))}
    return {**kept, **new}


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split("/")
    for length in range(len(parts) + 1):
        yield "/".join(parts[:length])


@contextmanager
def _opened(blob: Path, media_type: str) -> Iterator[tarfile.TarFile]:
    """Open a layer as a stream; Python's tarfile reads no zstd before 3.14."""
    if not media_type.endswith("zstd"):
        with tarfile.open(blob, "r|*") as archive:
            yield archive
        return
    argv = ["zstd", "--decompress", "--stdout", "--quiet", str(blob)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None  # noqa: S101 - a pipe, as requested
        assert child.stderr is not None  # noqa: S101
        with tarfile.open(fileobj=child.stdout, mode="r|") as archive:
            yield archive
        child.stdout.read()  # what follows the archive's end, or zstd fails to write it
        message = child.stderr.read().decode(errors="replace").strip()
    if child.returncode:
        raise LocalError(f"zstd cannot read the layer {blob}: {message}")
