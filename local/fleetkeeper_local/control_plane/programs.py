"""The programs of the cluster, built from upstream Go modules when first needed.

Each is cached under a digest of its sources and flags. With a warm cache, a fresh checkout or a CI
run builds nothing; a changed version is built again.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import NODE_SOURCES, cache_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.control_plane.program_table import COSTS, PROGRAMS, Assets, Program

BUILD_DISK_GIB = 8
"""Go's caches grow by about 5 GiB when everything is built for the first time."""
PROGRESS_PERIOD_S = 20
GIB = 1024**3

_HOME = {
    name: program
    for program in PROGRAMS.values()
    for name in (
        program.name,
        *program.links,
        *((program.assets.name,) if program.assets else ()),
    )
}


def program_path(name: str) -> Path:
    """Return the path of a program (kubectl, helm, kwok, ...) or its file; build it if missing.

    Raises:
        LocalError: the name is unknown, or Go, disk space or network are missing.
    """
    if name not in _HOME:
        raise LocalError(f"unknown program {name!r}; known: {', '.join(sorted(_HOME))}")
    program = _HOME[name]
    home = _home(program)
    if not (home / name).exists():
        build_programs([program.name])
    return home / name


def built(name: str) -> bool:
    """Return whether the program is in the cache."""
    return (_home(_HOME[name]) / name).exists()


def build_programs(names: Iterable[str]) -> None:
    """Build, in parallel, those of the named programs that are not in the cache yet.

    Raises:
        LocalError: Go or disk space is missing, or a build failed (with its last lines).
    """
    wanted = {_HOME[name].name: _HOME[name] for name in names}
    missing = [program for name, program in wanted.items() if not built(name)]
    if not missing:
        return
    _check_tools(missing)
    missing.sort(key=lambda program: -COSTS[program.name][0])
    for line in _plan(missing):
        say(line)
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(_build, program) for program in missing]:
            done.result()


def _plan(missing: list[Program]) -> Iterator[str]:
    """Yield what is built, why, and how long it takes."""
    minutes = sum(COSTS[program.name][0] for program in missing)
    yield f"building from Go modules, once: about {minutes:.0f} minutes of processor time"
    for program in missing:
        cost, purpose = COSTS[program.name]
        yield f"  {program.name:24} {cost:4.1f} min  {purpose}"


def _home(program: Program) -> Path:
    return cache_dir() / "programs" / f"{program.name}-{_digest(program)}"


def _digest(program: Program) -> str:
    """Return a digest of all inputs of the binary."""
    text = hashlib.sha256(repr((program, platform.machine())).encode())
    folder = NODE_SOURCES / program.module
    for path in sorted([*folder.glob("go.*"), *folder.glob("*.go")]):
        text.update(path.name.encode() + b"\0" + path.read_bytes())
    return text.hexdigest()[:16]


def _check_tools(missing: list[Program]) -> None:
    names = ", ".join(program.name for program in missing)
    if not NODE_SOURCES.is_dir():
        raise LocalError(
            f"{names}: no Go sources at {NODE_SOURCES}; run this from a checkout of the repository"
        )
    if shutil.which("go") is None:
        raise LocalError(
            f"{names}: not built yet, and `go` is not on the PATH; install Go 1.26 or later"
        )
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(cache).free / GIB
    if free_gib < BUILD_DISK_GIB:
        raise LocalError(
            f"{names}: building needs {BUILD_DISK_GIB} GiB free in {cache}, found {free_gib:.1f} GiB; "
            "free some space or set FLEETKEEPER_CACHE (and GOCACHE, GOMODCACHE) to a larger disk"
        )


def _build(program: Program) -> None:
    """Build one program into the cache, completely or not at all, and once if asked twice."""
    home = _home(program)
    with _locked(home.with_suffix(".lock")):
        if (home / program.name).exists():
            return
        started = time.monotonic()
        say(f"building {program.name}")
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".build-") as scratch:
            draft = Path(scratch) / "whole"
            draft.mkdir()
            _compile(program, draft / program.name, Path(scratch) / "log", started)
            for link in program.links:
                (draft / link).symlink_to(program.name)
            if program.assets is not None:
                _collect(program, program.assets, draft)
            # The directory appears complete, so that others can use everything in it.
            draft.replace(home)
        say(f"{program.name} is ready ({time.monotonic() - started:.0f} s)")


def _compile(program: Program, target: Path, log: Path, started: float) -> None:
    argv = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly"]
    argv += ["-ldflags", " ".join(["-s", "-w", *(f"-X {stamp}" for stamp in program.stamps)])]
    if program.tags:
        argv += ["-tags", program.tags]
    argv += ["-o", str(target), program.package]
    with log.open("wb") as output:
        child = subprocess.Popen(
            argv,
            cwd=NODE_SOURCES / program.module,
            env={**os.environ, "CGO_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while _still_running(child):
                waited_s = time.monotonic() - started
                say(f"building {program.name} ... {waited_s:.0f} s")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise LocalError(
            f"building {program.name} failed with exit code {child.returncode}:\n{tail}\n"
            "If a download failed, check the network and GOPROXY; then run it again; finished parts are kept."
        )


def _collect(program: Program, assets: Assets, target: Path) -> None:
    """Join upstream's files into one next to the binary."""
    folder = subprocess.run(
        ["go", "list", "-m", "-f", "{{.Dir}}", assets.upstream],
        cwd=NODE_SOURCES / program.module,
        capture_output=True,
        text=True,
        check=False,
    )
    if folder.returncode:
        raise LocalError(f"cannot get the sources of {assets.upstream}: {folder.stderr.strip()}")
    texts = [(Path(folder.stdout.strip()) / name).read_text() for name in assets.files]
    (target / assets.name).write_text("---\n".join(texts))


def _still_running(child: subprocess.Popen[bytes]) -> bool:
    """Wait up to one progress period; return True if the child has not ended by then."""
    try:
        child.wait(timeout=PROGRESS_PERIOD_S)
    except subprocess.TimeoutExpired:
        return True
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it when the holder dies, so it is never stale."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
