"""The project's images: how they are built, and pushed to where the node's pods can pull them.

Images are built by buildah from the same Containerfiles that a user builds with docker or podman.
Two shortcuts serve a machine without access to a public image registry, and quick iteration: the
base is made from Debian packages, and an environment that is ready on disk becomes a layer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetkeeper_local.common import packages
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.lock import exclusive
from fleetkeeper_local.common.paths import REPOSITORY, cache_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.common.shell import attempt, run
from fleetkeeper_local.images import engine_layers, oci, registry
from fleetkeeper_local.images.base import base_layout, redis_layout

BASE_VARIABLE = "FLEETKEEPER_BASE_IMAGE"
"""Names another base image, such as the official Python one, if a registry can be reached."""

IGNORE_FILE = ".dockerignore"
BUILD_TIMEOUT_S = 1800.0
BUILD_DISK_GIB = 15
GIB = 1024**3


@dataclass(frozen=True)
class Recipe:
    """One image of the project."""

    name: str
    containerfile: str
    """Path relative to the repository."""
    context: str = "."
    build_args: Mapping[str, str] = field(default_factory=dict)
    root: Path = field(default=REPOSITORY, repr=False)
    """The checkout. Its content is an input of the build, its path is none."""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("operator", "operator/Containerfile"),
        Recipe("engine", "engine_image/Containerfile.cpu"),
        Recipe("inject", "engine_image/Containerfile.inject"),
        Recipe("simulated", "engine_image/Containerfile.simulated"),
        Recipe("router", "router/Containerfile"),
        Recipe("gateway", "gateway/Containerfile"),
    )
}


@dataclass(frozen=True)
class Image:
    """A finished image, identified by its content."""

    name: str
    tag: str
    source: str
    """The name from which skopeo copies it."""

    def publish(self, prefix: str, tag: str, *, plain_http: bool = False) -> str:
        """Copy the image to a registry of the user; return its name there.

        Args:
            prefix: registry and path, such as `registry.example.com/fleetkeeper`.
            tag: the image's tag there.
            plain_http: the registry has no TLS.

        Raises:
            LocalError: the copy failed; the text is skopeo's.
        """
        target = f"{prefix.rstrip('/')}/{PUBLISHED[self.name]}:{tag}"
        return registry.copy(self.source, target, tls=not plain_http)

    def push(self, port: int) -> str:
        """Put the image into the registry on this port; return the name by which pods pull it."""
        repository = f"fleetkeeper/{self.name}"
        if registry.has_image(port, repository, self.tag):
            return registry.reference(port, repository, self.tag)
        return registry.push(self.source, port, repository, self.tag)


def build(name: str) -> Image:
    """Build one of the project's images in the quickest way for this machine.

    Raises:
        LocalError: the name is unknown, or the build failed.
    """
    if name not in BUILDERS:
        raise LocalError(f"unknown image {name!r}; known: {', '.join(sorted(BUILDERS))}")
    return BUILDERS[name]()


def engine_image(name: str = "engine", root: Path = REPOSITORY) -> Image:
    """Build the engine for CPU from the environment of `make setup-engine`, layer by layer.

    `root`: the checkout with our own packages.
    """
    layers = engine_layers.engine_layers(root)
    return layered_image(name, layers, engine_layers.engine_config(), base=base_layout())


def build_image(recipe: Recipe) -> Image:
    """Build a recipe's Containerfile; unchanged steps come from the last build.

    If nothing changed, buildah is not run: it would read every file of the image to find that out.

    Raises:
        LocalError: packages or disk space are missing, or a step failed (with its last lines).
    """
    packages.ensure_packages(packages.IMAGE_PACKAGES)
    containerfile = recipe.root / recipe.containerfile
    if not containerfile.exists():
        raise LocalError(
            f"{recipe.containerfile} does not exist; run this from a checkout of the repository"
        )
    with exclusive(store()):
        _check_disk()
        base = os.environ.get(BASE_VARIABLE) or _import_base()
        made_of = _made_of(recipe, base)
        image_id = _last_build(recipe, made_of)
        if image_id is not None:
            return _stored(recipe, image_id)
        started = time.monotonic()
        say(f"building image {recipe.name} from {recipe.containerfile}")
        with tempfile.TemporaryDirectory() as scratch:
            image_id_file = Path(scratch) / "id"
            argv = [*_buildah(), "build", "--layers", "--isolation=chroot", "--network=host"]
            argv += ["--timestamp=0", f"--iidfile={image_id_file}", f"--file={containerfile}"]
            argv += [f"--build-arg=BASE={base}", *_secrets()]
            argv += [f"--tag=localhost/fleetkeeper-{recipe.name}:latest"]  # or _prune removes it
            argv += [f"--build-arg={name}={value}" for name, value in recipe.build_args.items()]
            argv += [str(recipe.root / recipe.context)]
            done = attempt(*argv, timeout_s=BUILD_TIMEOUT_S)
            if done.returncode:
                tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
                raise LocalError(
                    f"building {recipe.name} failed with exit code {done.returncode}:\n{tail}"
                )
            image_id = image_id_file.read_text().strip().removeprefix("sha256:")
        _record(recipe).write_text(f"{made_of} {image_id}")
    say(f"image {recipe.name} is ready ({time.monotonic() - started:.0f} s)")
    return _stored(recipe, image_id)


def _made_of(recipe: Recipe, base: str) -> str:
    """Return a digest of all inputs of the build."""
    text = (recipe.root / recipe.containerfile).read_text()
    return context_digest(recipe.root / recipe.context, base, repr(recipe), text)


def context_digest(root: Path, *words: str) -> str:
    """Return a digest of every file of a build context (path, mode, content) and of other inputs.

    Args:
        root: the directory with .dockerignore, which allows files by lines that begin with `!`.
        words: other inputs of the build: the base image's name, build arguments and the like.

    Raises:
        OSError: .dockerignore or a file cannot be read.
    """
    found = hashlib.sha256(repr(words).encode())
    for path in _files(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        mode = path.stat().st_mode & 0o777
        found.update(f"{path.relative_to(root)}\0{mode:o}\0{content}\0".encode())
    return found.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    lines = (root / IGNORE_FILE).read_text().splitlines()
    for entry in sorted(root / line[1:] for line in lines if line.startswith("!")):
        for path in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def _record(recipe: Recipe) -> Path:
    """Return the file that records the inputs of the last build, and its image."""
    return store() / f"{recipe.name}.built"


def _last_build(recipe: Recipe, made_of: str) -> str | None:
    """Return the image of the last build if its inputs were the same and it still exists."""
    try:
        before, image_id = _record(recipe).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    if before != made_of or attempt(*_buildah(), "inspect", "--type=image", image_id).returncode:
        return None
    return image_id


def _stored(recipe: Recipe, image_id: str) -> Image:
    return Image(recipe.name, image_id[:16], f"{_storage()}@{image_id}")


def layered_image(
    name: str, layers: Sequence[oci.Layer], config: oci.ImageConfig, *, base: Path | None
) -> Image:
    """Assemble an image from a base's layout and finished layers, without a build step."""
    layout = oci.write_image(cache_dir() / "images" / name, layers, config, base=base)
    tag = oci.image_digest(layout).removeprefix("sha256:")[:16]
    return Image(name, tag, f"oci:{layout}:1")


def base_image() -> Image:
    """Return the base as an image with a shell and Python, for pods of the tests."""
    layout = base_layout()
    return Image("base", layout.name.removeprefix("base-"), f"oci:{layout}:1")


def redis_image() -> Image:
    """Return a Redis of the Debian packages, for nodes that reach no registry. It is never published."""
    layout = redis_layout()
    return Image("redis", layout.name.removeprefix("redis-"), f"oci:{layout}:1")


def _import_base() -> str:
    """Import the base into buildah; return its name there."""
    layout = base_layout()
    name = f"localhost/fleetkeeper-base:{layout.name.removeprefix('base-')}"
    if attempt(*_buildah(), "inspect", "--type=image", name).returncode:
        run(
            *("skopeo", "copy", "--insecure-policy", "--quiet"),
            *(f"oci:{layout}:1", f"{_storage()}{name}"),
            timeout_s=BUILD_TIMEOUT_S,
        )
    return name


def _secrets() -> list[str]:
    """Return the host's pip settings and certificates as build secrets; no image contains them."""
    found = []
    pip = Path("/etc/pip.conf")
    if pip.exists():
        found.append(f"--secret=id=pip,src={pip}")
    bundle = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    if bundle and Path(bundle).exists():
        found.append(f"--secret=id=certificates,src={bundle}")
    return found


def store() -> Path:
    """Return the folder of the images that buildah keeps, shared by all who build here."""
    return cache_dir() / "buildah"


def _buildah() -> list[str]:
    folder = store()
    return ["buildah", f"--root={folder / 'storage'}", f"--runroot={folder / 'run'}"]


def _storage() -> str:
    folder = store()
    return f"containers-storage:[overlay@{folder / 'storage'}+{folder / 'run'}]"


def _check_disk() -> None:
    folder = store()
    folder.mkdir(parents=True, exist_ok=True)
    if _free_gib(folder) < BUILD_DISK_GIB:
        _prune()
    free_gib = _free_gib(folder)
    if free_gib < BUILD_DISK_GIB:
        raise LocalError(
            f"building images needs {BUILD_DISK_GIB} GiB free in {folder}, found {free_gib:.1f} GiB; "
            "free some space or set FLEETKEEPER_CACHE to a larger disk"
        )


def _free_gib(folder: Path) -> float:
    return shutil.disk_usage(folder).free / GIB


def _prune() -> None:
    """Remove earlier builds without a name; each recipe's last build stays."""
    say("low disk space: removing earlier image builds")
    attempt(*_buildah(), "rmi", "--prune", timeout_s=BUILD_TIMEOUT_S)


BUILDERS: dict[str, Callable[[], Image]] = {
    "base": base_image,
    "engine": engine_image,
    "gateway": lambda: build_image(RECIPES["gateway"]),
    "inject": lambda: build_image(RECIPES["inject"]),
    "operator": lambda: build_image(RECIPES["operator"]),
    "redis": redis_image,
    "router": lambda: build_image(RECIPES["router"]),
    "simulated": lambda: build_image(RECIPES["simulated"]),
}
"""The builder of each image on this machine; Containerfile.cpu builds the engine elsewhere."""

PUBLISHED = {
    "engine": "fleetkeeper-engine-cpu",
    "gateway": "fleetkeeper-gateway",
    "inject": "fleetkeeper-engine",
    "operator": "fleetkeeper",
    "router": "fleetkeeper-router",
    "simulated": "fleetkeeper-engine-simulated",
}
"""The name of each image in a registry, as in the chart's values."""
