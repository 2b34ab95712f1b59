"""Images of Debian packages alone: the base of the local images, with Python, and a Redis."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fleetkeeper_local.common import packages
from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.lock import exclusive
from fleetkeeper_local.common.paths import cache_dir
from fleetkeeper_local.common.report import say
from fleetkeeper_local.common.shell import attempt, run
from fleetkeeper_local.images import oci

SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates", "libnuma1", "python3", "python3-venv")
"""vLLM's CPU kernels are linked to libnuma1. The local base image has no package sources."""
REDIS_PACKAGES = ("redis-server",)
BOOTSTRAP_TIMEOUT_S = 1800.0


def base_layout() -> Path:
    """Return the OCI layout of a small Debian with Python, made once by debootstrap and cached.

    Raises:
        LocalError: packages or network are missing.
    """
    return _debian("base", BASE_PACKAGES, "python3")


def redis_layout() -> Path:
    """Return the OCI layout of a small Debian with Redis, made in the same way.

    Raises:
        LocalError: packages or network are missing.
    """
    return _debian("redis", REDIS_PACKAGES, "redis-server")


def _debian(name: str, included: Sequence[str], command: str) -> Path:
    recipe = f"{SUITE} {' '.join(included)} 2"
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    home = cache_dir() / "images" / f"{name}-{key}"
    with exclusive(cache_dir() / "images"):
        if not (home / "index.json").exists():
            packages.ensure_packages(packages.IMAGE_PACKAGES)
            _bootstrap(home, included, command)
    return home


def _bootstrap(home: Path, included: Sequence[str], command: str) -> None:
    if os.geteuid() != 0:
        raise LocalError("building an image from Debian packages needs root (debootstrap)")
    say(f"building {home.name} from Debian packages (about a minute, once)")
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".debian-") as scratch:
        root = Path(scratch) / "root"
        run(
            *("debootstrap", "--variant=minbase", f"--include={','.join(included)}"),
            *(SUITE, root, _debian_mirror()),
            timeout_s=BOOTSTRAP_TIMEOUT_S,
        )
        layer = oci.write_layer(
            root,
            "",
            Path(scratch) / "layer",
            keep_rights=True,
            # Caches, and files that name the build machine.
            exclude=(
                "./var/cache/apt/*",
                "./var/lib/apt/lists/*",
                "./var/log/*",
                "./etc/hostname",
                "./etc/resolv.conf",
                "./etc/apt/sources.list",
                "./usr/share/doc/*",
                "./usr/share/locale/*",
                "./usr/share/man/*",
                "./dev/*",
            ),
        )
        config = oci.ImageConfig(
            command=[command],
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        oci.write_image(Path(scratch) / "layout", [layer], config).replace(home)


def _debian_mirror() -> str:
    """Return the mirror that this machine's apt uses."""
    sites = attempt("apt-get", "indextargets", "--format", "$(SITE)").stdout.split()
    mirrors = [site for site in sites if not site.rstrip("/").endswith("-security")]
    if not mirrors:
        raise LocalError("apt has no Debian mirror; check /etc/apt/sources.list.d")
    return mirrors[0]
