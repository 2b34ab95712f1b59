"""Images written directly as OCI layouts: a base, layers made by tar, a configuration.

For content that is ready on disk this is many times faster than a build in containers. The same
content always gives the same digest, so an unchanged layer is never pushed or pulled again.
https://github.com/opencontainers/image-spec/blob/v1.1.0/spec.md
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetkeeper_local.common.errors import LocalError

CHUNK_BYTES = 1 << 20
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
READABLE_BY_ALL = ("--owner=0", "--group=0", "--mode=a+rX,u+w,go-w")
EPOCH = "1970-01-01T00:00:00Z"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True)
class Layer:
    """One layer: the compressed file, its digest, and the digest of its content."""

    path: Path
    digest: str
    diff_id: str

    @property
    def size_bytes(self) -> int:
        """Size of the compressed file."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class ImageConfig:
    """The settings that a container of the image starts with; empty ones come from the base."""

    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def write_layer(
    source: Path,
    prefix: str,
    target: Path,
    *,
    exclude: Sequence[str] = (),
    keep_rights: bool = False,
) -> Layer:
    """Pack a directory's content under `prefix` into a layer; same content, same digest.

    Entries are sorted, have time 0 and, by default, owner 0:0 and are readable by all, so that
    nothing depends on this machine. A finished layer with the same `target` is reused.

    Args:
        source: the directory whose content is packed.
        prefix: where the content is in the image, without leading slash; "" for the root.
        target: the file to write; a small JSON file with the digests is kept next to it.
        exclude: tar patterns of files to leave out.
        keep_rights: whether to keep owners and modes (for a complete root file system).
    """
    known = target.with_name(target.name + ".json")
    if target.exists() and known.exists():
        return Layer(path=target, **json.loads(known.read_text()))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        rights = () if keep_rights else READABLE_BY_ALL
        diff_id = _pack(source, prefix, draft, [*rights, *(f"--exclude={p}" for p in exclude)])
        digest = _sha256(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    layer = Layer(target, digest, diff_id)
    known.write_text(json.dumps({"digest": digest, "diff_id": diff_id}))
    return layer


def write_image(
    layout: Path, layers: Sequence[Layer], config: ImageConfig, *, base: Path | None = None
) -> Path:
    """Write an OCI layout with one image, tag `1`, and return its directory.

    Args:
        layout: the directory to create; an older one is replaced.
        layers: lowest first, on top of the base's.
        config: how its containers start.
        base: the layout of the image to build on; None for an empty one.
    """
    shutil.rmtree(layout, ignore_errors=True)
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    manifest, settings = _base_of(base, blobs) if base else _empty()
    for layer in layers:
        _link(layer.path, blobs / layer.digest.removeprefix("sha256:"))
        manifest["layers"].append(
            {"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.size_bytes}
        )
        settings["rootfs"]["diff_ids"].append(layer.diff_id)
    # buildah rejects a base whose history does not name each of its layers.
    settings["history"] += [{"created": EPOCH, "created_by": "files"} for _ in layers]
    _merge(settings["config"], config)
    manifest["config"] = {"mediaType": CONFIG_TYPE, **_blob(blobs, settings)}
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": MANIFEST_TYPE,
                **_blob(blobs, manifest),
                "annotations": {"org.opencontainers.image.ref.name": "1"},
            }
        ],
    }
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return layout


def image_digest(layout: Path) -> str:
    """Return the digest of the layout's image: `sha256:...`."""
    index = json.loads((layout / "index.json").read_text())
    digest: str = index["manifests"][0]["digest"]
    return digest


def _pack(source: Path, prefix: str, target: Path, options: Sequence[str]) -> str:
    """Run tar through a hash into zstd and return the hash of the uncompressed stream."""
    argv = ["tar", "-C", str(source), "--sort=name", "--numeric-owner", "--mtime=@0"]
    argv += ["--format=gnu", *options]
    if prefix:
        argv.append(rf"--transform=s,^\./,{prefix.strip('/')}/,")
    hashed = hashlib.sha256()
    with (
        target.open("wb") as output,
        subprocess.Popen([*argv, "-cf", "-", "."], stdout=subprocess.PIPE) as tar,
        subprocess.Popen(
            ["zstd", "-1", "-T2", "-q", "-c"], stdin=subprocess.PIPE, stdout=output
        ) as zstd,
    ):
        if tar.stdout is None or zstd.stdin is None:
            raise TypeError("tar's output or zstd's input is not a pipe")
        while chunk := tar.stdout.read(CHUNK_BYTES):
            hashed.update(chunk)
            zstd.stdin.write(chunk)
        zstd.stdin.close()
    if tar.returncode or zstd.returncode:
        raise LocalError(
            f"packing {source} failed: exit codes tar {tar.returncode}, zstd {zstd.returncode}"
        )
    return f"sha256:{hashed.hexdigest()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return f"sha256:{hashlib.file_digest(handle, 'sha256').hexdigest()}"


def _empty() -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": []}
    settings = {
        "architecture": _architecture(),
        "os": "linux",
        "created": EPOCH,
        "config": {},
        "history": [],
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    return manifest, settings


def _base_of(base: Path, blobs: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the base's manifest and configuration; link its layers into `blobs`."""

    def blob(digest: str) -> Path:
        return base / "blobs" / "sha256" / digest.removeprefix("sha256:")

    index = json.loads((base / "index.json").read_text())
    manifest = json.loads(blob(index["manifests"][0]["digest"]).read_text())
    settings = json.loads(blob(manifest["config"]["digest"]).read_text())
    for layer in manifest["layers"]:
        _link(blob(layer["digest"]), blobs / layer["digest"].removeprefix("sha256:"))
    settings.setdefault("config", {})
    settings.setdefault("history", [])
    return manifest, settings


def _merge(settings: dict[str, Any], config: ImageConfig) -> None:
    given: dict[str, Any] = {
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.command),
        "User": config.user,
        "WorkingDir": config.working_dir,
    }
    settings.update({name: value for name, value in given.items() if value})
    env = dict(entry.split("=", 1) for entry in settings.get("Env", ()))
    settings["Env"] = [f"{name}={value}" for name, value in {**env, **config.env}.items()]
    settings["Labels"] = {**settings.get("Labels", {}), **config.labels}


def _blob(blobs: Path, document: dict[str, Any]) -> dict[str, Any]:
    content = json.dumps(document, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    (blobs / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def _link(source: Path, target: Path) -> None:
    """Create a hard link if the disk allows it, else a copy."""
    if target.exists():
        return
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _architecture() -> str:
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
