"""Create the virtual environments and the lock files. Needs only Python's standard library.

    python3 scripts/setup.py dev      # .venv: the operator and its tests
    python3 scripts/setup.py engine   # .venv-engine, on torch and vLLM for CPU in the cache
    python3 scripts/setup.py lock     # requirements/*.txt, pinned with hashes

Each environment has a stamp with the digest of its inputs. If the stamp matches, nothing is done.
An interrupted run leaves no stamp, and the next run completes it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
GIB = 1024**3
ENGINE_DISK_GIB = 25
DEV_DISK_GIB = 2
BUILD_PINS = ["--build-constraint", str(REQUIREMENTS / "build.txt")]
"""Pins the build tools of our own packages, so that an install is reproducible."""


def cache_dir() -> Path:
    """Return the directory of everything that may outlive a checkout."""
    given = os.environ.get("FLEETKEEPER_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fleetkeeper"


def fail(message: str) -> None:
    """Exit with one clear line."""
    sys.exit(f"setup: {message}")


def say(message: str) -> None:
    """Print a line at once."""
    print(f"setup: {message}", flush=True)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock so that one setup runs at a time; the kernel releases it when the holder dies."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "setup.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def require_disk(folder: Path, wanted_gib: int, what: str) -> None:
    """Exit with a clear line if the disk has too little space."""
    folder.mkdir(parents=True, exist_ok=True)
    free_gib = shutil.disk_usage(folder).free / GIB
    if free_gib < wanted_gib:
        fail(
            f"{what} needs {wanted_gib} GiB free in {folder}, found {free_gib:.1f} GiB; "
            "free some space or set FLEETKEEPER_CACHE to a larger disk"
        )


def digest(paths: list[Path]) -> str:
    """Return a digest of the interpreter's version and the given files."""
    text = hashlib.sha256(f"{sys.version_info[:3]}".encode())
    for path in paths:
        text.update(path.read_bytes())
    return text.hexdigest()[:16]


def run(argv: list[str | Path]) -> None:
    """Run a command; if it fails, exit with its name and status."""
    done = subprocess.run([str(word) for word in argv], cwd=ROOT, check=False)
    if done.returncode:
        fail(
            f"`{' '.join(str(w) for w in argv[:4])} ...` failed with exit code {done.returncode}; "
            "fix the error above and run the same command again; finished parts are kept"
        )


def bootstrap_uv() -> Path:
    """Return the installer, pinned with hashes, from an environment of its own in the cache."""
    pins = REQUIREMENTS / "bootstrap.txt"
    home = cache_dir() / f"uv-{digest([pins])}"
    tool = home / "bin" / "uv"
    if not (home / ".complete").exists():
        say("installing the package installer (uv)")
        shutil.rmtree(home, ignore_errors=True)
        if importlib.util.find_spec("ensurepip") is None:
            fail(
                "this Python cannot create virtual environments; on Debian: apt-get install python3-venv"
            )
        run([sys.executable, "-m", "venv", home])
        run([home / "bin" / "pip", "install", "--quiet", "--require-hashes", "-r", pins])
        (home / ".complete").touch()
    return tool


def stamped(home: Path, stamp: str) -> bool:
    """Return whether the environment was completed from exactly these inputs."""
    mark = home / ".fleetkeeper-stamp"
    return mark.exists() and mark.read_text() == stamp


def make_dev() -> None:
    """Create .venv with what `make check`, the operator and the tests need."""
    home = ROOT / ".venv"
    pins = REQUIREMENTS / "dev.txt"
    stamp = digest([pins, ROOT / "pyproject.toml", ROOT / "engine_image" / "pyproject.toml"])
    if stamped(home, stamp):
        return
    require_disk(cache_dir(), DEV_DISK_GIB, "the development environment")
    started = time.monotonic()
    uv = bootstrap_uv()
    say("creating .venv (operator and tests)")
    if not (home / "bin" / "python").exists():
        run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, home])
    python = home / "bin" / "python"
    run([uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, pins])
    run(
        [
            uv,
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            *BUILD_PINS,
            "--python",
            python,
            "-e",
            ".",
            "-e",
            "engine_image",
        ]
    )
    (home / ".fleetkeeper-stamp").write_text(stamp)
    say(f".venv is ready ({time.monotonic() - started:.0f} s)")


def engine_pins() -> list[Path]:
    """Return the lock files of the engine environment."""
    return [REQUIREMENTS / "engine.txt", REQUIREMENTS / "engine-nodeps.txt"]


def engine_base() -> Path:
    """Return the path of the stock environment (torch, vLLM for CPU), which checkouts share."""
    return cache_dir() / f"engine-{digest(engine_pins())}"


def make_engine_base() -> Path:
    """Install torch and vLLM for CPU into the cache, because they take 6 GB."""
    pins = engine_pins()
    stamp = digest(pins)
    home = engine_base()
    if stamped(home, stamp):
        return home
    require_disk(home, ENGINE_DISK_GIB, "the engine environment with its images")
    started = time.monotonic()
    uv = bootstrap_uv()
    say("creating the engine environment (6 GB; some minutes the first time)")
    python = home / "bin" / "python"
    if not python.exists():
        run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, home])
    install: list[str | Path] = [uv, "pip", "install", "--require-hashes", "--python", python]
    run([*install, "-r", pins[0]])
    run([*install, "--no-deps", "-r", pins[1]])
    # Without byte code every start of vLLM compiles thousands of files and takes twice as long. A
    # few files of torch's tests need a newer Python; that they do not compile is not a failure.
    subprocess.run([python, "-m", "compileall", "-qq", "-j0", home / "lib"], check=False)
    (home / ".fleetkeeper-stamp").write_text(stamp)
    say(f"the engine environment is ready ({time.monotonic() - started:.0f} s)")
    return home


def make_engine() -> None:
    """Create .venv-engine: a thin environment of this checkout on top of the shared one.

    It contains our package. `.venv-engine/base` is the shared environment, which looks like a stock
    vLLM image.
    """
    base = make_engine_base()
    home = ROOT / ".venv-engine"
    stamp = f"{base.name} {digest([ROOT / 'engine_image' / 'pyproject.toml'])}"
    if stamped(home, stamp):
        return
    uv = bootstrap_uv()
    if home.is_symlink():
        home.unlink()
    run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, home])
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    stock = base / "lib" / version / "site-packages"
    (home / "lib" / version / "site-packages" / "engine-base.pth").write_text(
        f"import site; site.addsitedir({str(stock)!r})\n"
    )
    link = home / "base"
    link.unlink(missing_ok=True)
    link.symlink_to(base)
    python = home / "bin" / "python"
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", *BUILD_PINS]
    run([*install, "--python", python, "-e", "engine_image"])
    (home / ".fleetkeeper-stamp").write_text(stamp)


def lock() -> None:
    """Pin every requirement again, with hashes and without index addresses."""
    uv = bootstrap_uv()
    common = [
        "--quiet",
        "--generate-hashes",
        "--no-emit-index-url",
        "--no-header",
        "--universal",
        "--python-version",
        "3.11",
        "--upgrade",
    ]
    for target, source in (
        ("bootstrap", "bootstrap.in"),
        ("build", "build.in"),
        ("engine-nodeps", "engine-nodeps.in"),
        ("engine", "engine.in"),
        ("engine-package", "engine-package.in"),
        ("router", "router.in"),
    ):
        if (REQUIREMENTS / source).exists():
            extra = ["--no-deps"] if target == "engine-nodeps" else []
            run(
                [
                    uv,
                    "pip",
                    "compile",
                    *common,
                    *extra,
                    REQUIREMENTS / source,
                    "-o",
                    REQUIREMENTS / f"{target}.txt",
                ]
            )
    run([uv, "pip", "compile", *common, "pyproject.toml", "-o", REQUIREMENTS / "operator.txt"])
    run(
        [
            uv,
            "pip",
            "compile",
            *common,
            "--extra",
            "test",
            "pyproject.toml",
            "engine_image/pyproject.toml",
            "-o",
            REQUIREMENTS / "dev.txt",
        ]
    )


def main() -> None:
    """Parse the arguments and run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["dev", "engine", "lock"])
    what = parser.parse_args().what
    if sys.version_info < (3, 11):  # noqa: UP036 - the user's python3 may be older
        fail(
            f"Python 3.11 or later is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11"
        )
    with one_at_a_time():
        {"dev": make_dev, "engine": make_engine, "lock": lock}[what]()


if __name__ == "__main__":
    main()
