"""The engine's CPU image from an environment that is ready on disk, without a build step.

It has the content of `engine_image/Containerfile.cpu`: a layer with the pinned site-packages and
their byte code, one with what streams models from object storage, and a small one with our own
packages. The first two are packed once per lock file. A change of our code makes only the last one,
in about a second.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.paths import REPOSITORY, cache_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.common.shell import run
from fleetkeeper_local.images import oci

VENV = "opt/venv"
COMPILE_TIMEOUT_S = 600.0
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SITE = f"{VENV}/lib/{PYTHON}/site-packages"
OTHER_PYTHON = "/py31[2-9]_"
"""Files of torch that only a later Python can read, and that the engine never imports."""
ENTRYPOINT = "fleetkeeper-engine"


def engine_layers(root: Path = REPOSITORY) -> list[oci.Layer]:
    """Return the layers above the base, which has the system libraries. Ours is the last.

    `root`: the checkout with our packages. The dependencies are always those of this checkout.

    Raises:
        LocalError: `make setup-engine` was not run, or its Python differs from the base's.
    """
    environment = (REPOSITORY / ".venv-engine" / "base").resolve()
    stock = environment / "lib" / PYTHON / "site-packages"
    streamer = (REPOSITORY / ".venv-engine" / "engine-streamer").resolve()
    complete = all((found / ".fleetkeeper-stamp").exists() for found in (environment, streamer))
    if not complete or not stock.is_dir():
        raise LocalError("the engine environment does not exist; run: make setup-engine")
    layers = cache_dir() / "images" / "layers"
    return [
        _dependencies(environment.name, stock, layers),
        _dependencies(streamer.name, streamer / "site", layers),
        _own_packages(layers, root),
    ]


def _dependencies(key: str, stock: Path, layers: Path) -> oci.Layer:
    target = layers / f"{key}.tar.zst"
    if not target.exists():
        say(f"packing {key} into a layer (up to a minute, once per lock file)")
        _compile(stock)
    # All times in a layer are 0, which would invalidate byte code that records its source's time.
    return oci.write_layer(stock, SITE, target, exclude=("*.opt-1.pyc", "*.opt-2.pyc"))


def _own_packages(layers: Path, checkout: Path) -> oci.Layer:
    """Return the layer of our packages and the virtual environment's frame, packed every time."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        site = root / SITE
        binaries = root / VENV / "bin"
        binaries.mkdir(parents=True)
        ignore = shutil.ignore_patterns("__pycache__")
        # Those that this checkout has: an earlier release has fewer.
        shared = sorted(path.parent for path in (checkout / "contract").glob("*/__init__.py"))
        for source in (*shared, checkout / "engine_image" / "fleetkeeper_engine"):
            shutil.copytree(source, site / source.name, ignore=ignore)
        # The same code gives the same layer only if the temporary directory's name is not in it.
        _compile(site, "-s", str(root), "-p", "/")
        (root / VENV / "pyvenv.cfg").write_text(
            "home = /usr/bin\ninclude-system-site-packages = false\n"
        )
        for name in ("python", "python3", PYTHON):
            (binaries / name).symlink_to("/usr/bin/python3")
        script = binaries / ENTRYPOINT
        script.write_text(
            f"#!/{VENV}/bin/python3\n"
            "import sys\nfrom fleetkeeper_engine.cli import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)
        layer = oci.write_layer(root, "", Path(scratch) / "layer")
        target = layers / f"own-{layer.digest.removeprefix('sha256:')[:16]}.tar.zst"
        shutil.copyfile(layer.path, target)
    return oci.Layer(target, layer.digest, layer.diff_id)


def _compile(folder: Path, *options: str) -> None:
    """Compile to byte code that is valid regardless of the sources' times."""
    argv = [sys.executable, "-m", "compileall", "-q", "-j2", "--invalidation-mode"]
    argv += ["unchecked-hash", "-x", OTHER_PYTHON, *options, str(folder)]
    run(*argv, timeout_s=COMPILE_TIMEOUT_S)


def engine_config() -> oci.ImageConfig:
    """Return how the image's containers start, as in the Containerfile."""
    return oci.ImageConfig(
        entrypoint=[ENTRYPOINT],
        user="65532:65532",
        working_dir="/tmp",  # noqa: S108 - the container's own
        env={
            "PATH": f"/{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONUNBUFFERED": "1",
            "HOME": "/tmp",  # noqa: S108 - as above
        },
    )
