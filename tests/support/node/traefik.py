"""Traefik, a real implementation of the Gateway API, built from its Go module when first needed.

Its module lacks the built dashboard, and some SDKs of its certificate library's DNS providers cannot
be had. So both modules are copied from Go's cache, and one file of each is replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fleetkeeper_local.common.paths import NODE_SOURCES, cache_dir

SOURCES = NODE_SOURCES / "traefik"
TRAEFIK = "github.com/traefik/traefik/v3"
BUILD_GUARD_S = 1500.0
"""The first build downloads 700 MB and takes four minutes of two cores."""


@dataclass(frozen=True)
class Copy:
    """An upstream module that is built from a copy, with one file of ours instead of one of its own."""

    module: str
    version: str
    folder: str
    without: str
    """Folders left out, as a glob; empty: none."""
    file: str
    ours: str


COPIES = (
    Copy(TRAEFIK, "v3.6.12", "traefik", "", "webui/embed.go", "dashboard.go.in"),
    Copy(
        "github.com/go-acme/lego/v4",
        "v4.33.0",
        "lego",
        "providers/dns/*/",
        "providers/dns/zz_gen_dns_providers.go",
        "dns_providers.go.in",
    ),
)
GATEWAY_API = ("sigs.k8s.io/gateway-api", "v1.4.0")
CRDS = "gateway-api.yaml"


def traefik() -> Path:
    """Return the program, built if it is not in the cache; the CRDs are beside it in `CRDS`."""
    text = hashlib.sha256(repr((COPIES, GATEWAY_API)).encode())
    for path in sorted(SOURCES.iterdir()):
        text.update(path.name.encode() + b"\0" + path.read_bytes())
    home = cache_dir() / "programs" / f"traefik-{text.hexdigest()[:16]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            _build(home)
    return home / "traefik"


def _build(home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".build-") as scratch:
        module, draft = Path(scratch) / "module", Path(scratch) / "whole"
        draft.mkdir()
        shutil.copytree(SOURCES, module)
        for copy in COPIES:
            _copy(copy, module)
        argv = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", "-s -w"]
        _run([*argv, "-o", str(draft / "traefik"), f"{TRAEFIK}/cmd/traefik"], module)
        crds = sorted((_downloaded(*GATEWAY_API) / "config" / "crd" / "standard").glob("*.yaml"))
        (draft / CRDS).write_text("---\n".join(path.read_text() for path in crds))
        draft.replace(home)


def _copy(copy: Copy, module: Path) -> None:
    target = module / copy.folder
    shutil.copytree(_downloaded(copy.module, copy.version), target)
    for path in [target, *target.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    if copy.without:
        for folder in target.glob(copy.without):
            shutil.rmtree(folder)
    shutil.copyfile(module / copy.ours, target / copy.file)


def _downloaded(module: str, version: str) -> Path:
    """Return the folder of a module in Go's cache, checked against Go's checksum database."""
    _run(["go", "mod", "download", f"{module}@{version}"], Path(tempfile.gettempdir()))
    cache = Path(_run(["go", "env", "GOMODCACHE"], Path(tempfile.gettempdir())).strip())
    return cache / f"{module}@{version}"


def _run(argv: list[str], folder: Path) -> str:
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=BUILD_GUARD_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr[-4000:]}"
    return done.stdout
