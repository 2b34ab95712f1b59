"""The tools of the container runtime, from Debian packages, never run as system services."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.report import say

CNI_PLUGINS = Path("/usr/lib/cni")

NODE_PACKAGES = {
    "runc": "runc",
    "docker-registry": "docker-registry",
    "skopeo": "skopeo",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "zstd": "zstd",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    str(CNI_PLUGINS / "host-local"): "containernetworking-plugins",
}
"""The commands (or files) that a node needs, and the Debian packages that contain them."""

IMAGE_PACKAGES = {
    "buildah": "buildah",
    "skopeo": "skopeo",
    "debootstrap": "debootstrap",
    "zstd": "zstd",
}
"""The same for building images."""

BROWSER_PACKAGES = {"chromium": "chromium"}
"""The same for the test of the console's page."""

REDIS_PACKAGES = {"redis-server": "redis-server"}
"""The same for tests of limits that the gateway's replicas share."""

POLICY = Path("/usr/sbin/policy-rc.d")
LOCK = Path("/run/lock/fleetkeeper-packages")
APT_TIMEOUT_S = 900
LOCK_TIMEOUT_S = 600
"""Time for which apt-get waits for another apt-get."""


def missing_packages(wanted: dict[str, str]) -> list[str]:
    """Return the packages whose command or file is missing."""
    return sorted({package for command, package in wanted.items() if not _present(command)})


def ensure_packages(wanted: dict[str, str]) -> None:
    """Install missing packages.

    Raises:
        LocalError: packages are missing and cannot be installed from here; the text says how to do
            it.
    """
    if missing_packages(wanted):
        with _one_at_a_time():
            _install(wanted)


def _install(wanted: dict[str, str]) -> None:
    missing = missing_packages(wanted)
    if not missing:
        return  # another process installed them in the meantime
    words = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise LocalError(
            f"missing Debian packages: {words}; install them as root "
            f"(apt-get install --no-install-recommends {words}), or with your distribution's package manager"
        )
    say(f"installing Debian packages: {words}")
    with _services_stay_off():
        _apt("update")
        _apt("install", "--yes", "--no-install-recommends", *missing)
    still = missing_packages(wanted)
    if still:
        raise LocalError(
            f"apt-get installed {words}, but commands or files of {still} are still missing"
        )


def _present(command: str) -> bool:
    if command.startswith("/"):
        return Path(command).exists()
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _apt(*words: str) -> None:
    try:
        done = subprocess.run(
            ["apt-get", "--quiet", f"--option=DPkg::Lock::Timeout={LOCK_TIMEOUT_S}", *words],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=APT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise LocalError(
            f"apt-get {words[0]} timed out after {APT_TIMEOUT_S} s; check the network and "
            "whether another apt holds the lock, then retry"
        ) from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise LocalError(
            f"apt-get {' '.join(words)} failed with exit code {done.returncode}:\n{tail}"
        )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for our other processes: apt-get fails beside another one, and so would policy-rc.d."""
    if not os.access(LOCK.parent, os.W_OK):
        yield  # not root: nothing is installed
        return
    with LOCK.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _services_stay_off() -> Iterator[None]:
    """Keep packages from starting their services while they are installed, with policy-rc.d."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
