"""Create the virtual environments and the lock files. Needs only Python's standard library.

    python3 scripts/setup.py dev         # .venv from uv.lock: the operator and its tests
    python3 scripts/setup.py engine      # .venv-engine, on torch and vLLM for CPU in the cache
    python3 scripts/setup.py engine-previous  # .venv-engine-previous: the same with the previous vLLM
    python3 scripts/setup.py lock        # uv.lock and requirements/*.txt, pinned with hashes
    python3 scripts/setup.py check-lock  # fails if one of them is out of date
    .venv/bin/python scripts/setup.py wheels  # the wheels of our packages, to dist

An engine environment has a stamp with the digest of its inputs. If the stamp matches, nothing is
done. An interrupted run leaves no stamp, and the next run completes it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
GIB = 1024**3
ENGINE_DISK_GIB = 25
PREVIOUS_DISK_GIB = 10
DEV_DISK_GIB = 2
BUILD_PINS = ["--build-constraint", str(REQUIREMENTS / "build.txt")]
"""Pins the build tools of our own packages, so that an install is reproducible."""
WORKSPACE = (
    "fleetkeeper",
    "fleetkeeper-contract",
    "fleetkeeper-engine",
    "fleetkeeper-gateway",
    "fleetkeeper-kube",
    "fleetkeeper-local",
    "fleetkeeper-router",
)
EXPORTS = {
    "bootstrap": ["--only-group", "bootstrap"],
    "build": ["--only-group", "build"],
    "engine-package": ["--package", "fleetkeeper-engine", "--extra", "cuda"],
    "engine-simulated": ["--package", "fleetkeeper-engine", "--extra", "simulated"],
    "gateway": ["--package", "fleetkeeper-gateway"],
    "operator": ["--package", "fleetkeeper"],
    "router": ["--package", "fleetkeeper-router"],
}
"""The requirement files that are exported from uv.lock, and what of it each contains."""
ADDITIONS = ("engine-streamer", "engine-test")
"""Distributions of an engine environment in addition to torch and vLLM, each in a directory of its own."""


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


def make_dev() -> None:
    """Make .venv equal to uv.lock: what `make check`, the operator and the tests need."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        require_disk(cache_dir(), DEV_DISK_GIB, "the development environment")
        say("creating .venv (operator and tests)")
    uv = bootstrap_uv()
    # Our packages are built by the build tools that uv.lock pins with hashes, in .venv itself.
    ours = [word for name in WORKSPACE for word in ("--no-build-isolation-package", name)]
    run([uv, "sync", "--quiet", "--frozen", "--python", sys.executable, *ours])


def make_wheels() -> None:
    """Build the wheels of our packages with the build tools of this interpreter's environment."""
    words = ["--all-packages", "--wheel", "--no-build-isolation", "--no-create-gitignore"]
    run([bootstrap_uv(), "build", "--quiet", *words, "--python", sys.executable, "-o", "dist"])


def stamped(home: Path, stamp: str) -> bool:
    """Return whether the environment was completed from exactly these inputs."""
    mark = home / ".fleetkeeper-stamp"
    return mark.exists() and mark.read_text() == stamp


def engine_pins(which: str = "") -> list[Path]:
    """Return the lock files of the engine environment; `which` is empty or `-previous`."""
    return [REQUIREMENTS / f"engine{which}.txt", REQUIREMENTS / f"engine{which}-nodeps.txt"]


def engine_base(which: str = "") -> Path:
    """Return the path of the stock environment (torch, vLLM for CPU), which checkouts share."""
    return cache_dir() / f"engine{which}-{digest(engine_pins(which))}"


def make_engine_base(which: str) -> Path:
    """Install torch and vLLM for CPU into the cache, because they take 6 GB."""
    pins = engine_pins(which)
    stamp = digest(pins)
    home = engine_base(which)
    if stamped(home, stamp):
        return home
    if which:
        require_disk(home, PREVIOUS_DISK_GIB, "the engine environment with the previous vLLM")
    else:
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


def make_addition(name: str, base: Path) -> Path:
    """Install an addition to the engine environment into the cache. Its packages are in `site`."""
    pins = REQUIREMENTS / f"{name}.txt"
    stamp = digest([pins])
    home = cache_dir() / f"{name}-{stamp}"
    if not stamped(home, stamp):
        shutil.rmtree(home, ignore_errors=True)
        install: list[str | Path] = [bootstrap_uv(), "pip", "install", "--quiet", "--no-deps"]
        place: list[str | Path] = ["--python", base / "bin" / "python", "--target", home / "site"]
        run([*install, *place, "--require-hashes", "-r", pins])
        (home / ".fleetkeeper-stamp").write_text(stamp)
    return home


def make_engine(which: str = "") -> None:
    """Create .venv-engine: a thin environment of this checkout on top of the shared one.

    It contains our package and the additions, for example `.venv-engine/engine-streamer`.
    `.venv-engine/base` is the shared environment, which looks like a vLLM image without them.
    """
    base = make_engine_base(which)
    links = {"base": base, **{name: make_addition(name, base) for name in ADDITIONS}}
    home = ROOT / f".venv-engine{which}"
    version = ROOT / "contract" / "fleetkeeper_contract" / "version.py"
    package = digest([ROOT / "engine_image" / "pyproject.toml", version])
    stamp = " ".join([package, *(target.name for target in links.values())])
    if stamped(home, stamp):
        return
    uv = bootstrap_uv()
    if home.is_symlink():
        home.unlink()
    run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, home])
    packages = Path("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    sites = [base / packages, *(links[name] / "site" for name in ADDITIONS)]
    (home / packages / "engine-base.pth").write_text(
        "".join(f"import site; site.addsitedir({str(site)!r})\n" for site in sites)
    )
    for name, target in links.items():
        link = home / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    python = home / "bin" / "python"
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", *BUILD_PINS]
    run([*install, "--python", python, "-e", "contract", "-e", "engine_image"])
    (home / ".fleetkeeper-stamp").write_text(stamp)


def lock() -> None:
    """Pin every requirement again, with hashes: uv.lock, its exports, and the engine environment."""
    uv = bootstrap_uv()
    run([uv, "lock", "--quiet", "--upgrade"])
    export(uv, REQUIREMENTS)
    compiled = ["--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header", "--universal"]
    compiled += ["--python-version", "3.11"]
    for name, options in (
        ("engine", []),
        ("engine-nodeps", ["--no-deps"]),
        ("engine-previous-nodeps", ["--no-deps"]),
    ):
        source, target = REQUIREMENTS / f"{name}.in", REQUIREMENTS / f"{name}.txt"
        run([uv, "pip", "compile", *compiled, "--upgrade", *options, source, "-o", target])
    # Versions that the target already has are kept, so it differs only where the overrides say.
    overrides, target = REQUIREMENTS / "engine-previous.in", REQUIREMENTS / "engine-previous.txt"
    shutil.copyfile(REQUIREMENTS / "engine.txt", target)
    source = REQUIREMENTS / "engine.in"
    run([uv, "pip", "compile", *compiled, "--override", overrides, source, "-o", target])
    lock_additions(uv, compiled)


def lock_additions(uv: Path, options: list[str]) -> None:
    """Pin the additions to the engine environment. Each has only what those before it lack."""
    known = [REQUIREMENTS / "engine.txt"]
    for name in ADDITIONS:
        pinned = "".join(file.read_text() for file in known)
        omitted = re.findall(r"^([A-Za-z0-9._-]+)==", pinned, re.MULTILINE)
        words = [*options, "--upgrade"]
        words += [word for file in known for word in ("--constraint", str(file))]
        words += [word for package in omitted for word in ("--no-emit-package", package)]
        target = REQUIREMENTS / f"{name}.txt"
        run([uv, "pip", "compile", *words, REQUIREMENTS / f"{name}.in", "-o", target])
        known.append(target)


def export(uv: Path, folder: Path) -> None:
    """Write the requirements of the images and of this script from uv.lock."""
    for name, selection in EXPORTS.items():
        words = ["--quiet", "--frozen", "--no-header", "--no-emit-workspace", "--no-default-groups"]
        run([uv, "export", *words, *selection, "-o", folder / f"{name}.txt"])


def check_lock() -> None:
    """Exit with a clear line if uv.lock or an export does not fit what it was made from."""
    uv = bootstrap_uv()
    run([uv, "lock", "--quiet", "--check", "--offline"])
    with tempfile.TemporaryDirectory() as scratch:
        export(uv, Path(scratch))
        for made in sorted(Path(scratch).iterdir()):
            if made.read_bytes() != (REQUIREMENTS / made.name).read_bytes():
                fail(f"requirements/{made.name} differs from uv.lock; run: make lock")


def main() -> None:
    """Parse the arguments and run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {
        "dev": make_dev,
        "engine": make_engine,
        "engine-previous": lambda: make_engine("-previous"),
        "lock": lock,
        "check-lock": check_lock,
        "wheels": make_wheels,
    }
    parser.add_argument("what", choices=commands)
    what = parser.parse_args().what
    if sys.version_info < (3, 11):  # noqa: UP036 - the user's python3 may be older
        fail(
            f"Python 3.11 or later is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11"
        )
    with one_at_a_time():
        commands[what]()


if __name__ == "__main__":
    main()
