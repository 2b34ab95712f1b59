"""Check the Go sources under local/node: formatting, and the findings of `go vet`.

`go vet` reads every package that a module depends on; for the 2,800 of Kubernetes that takes a
quarter of an hour. Building the programs type-checks those modules anyway, so modules with
dependencies are vetted only with --all. Sources that passed once are not vetted again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fleetkeeper_local.common.paths import NODE_SOURCES, cache_dir


def main() -> None:
    """Exit with status 1 and the findings, or silently."""
    if shutil.which("go") is None:
        sys.exit("check: `go` is not on the PATH; install Go 1.26 or later")
    unformatted = _output(["gofmt", "-l", "."], NODE_SOURCES)
    if unformatted:
        sys.exit(f"check: not formatted (gofmt -w): {unformatted}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="also vet modules with dependencies")
    everything = parser.parse_args().all
    for module in sorted(path.parent for path in NODE_SOURCES.glob("*/main.go")):
        if everything or "require" not in (module / "go.mod").read_text():
            _vet(module)


def _vet(module: Path) -> None:
    """Vet a module unless the same sources passed before."""
    text = hashlib.sha256()
    for path in sorted([*module.glob("*.go"), *module.glob("go.*")]):
        text.update(path.read_bytes())
    passed = cache_dir() / "vetted" / f"{module.name}-{text.hexdigest()[:16]}"
    if passed.exists():
        return
    print(f"check: vetting {module.name} (compiles its dependencies the first time)", flush=True)
    _output(["go", "vet", "-trimpath", "-buildvcs=false", "-mod=readonly", "./..."], module)
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()


def _output(argv: list[str], folder: Path) -> str:
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"check: `{' '.join(argv)}` in {folder}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
