"""The cluster's own image registry on loopback, filled by skopeo."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.common.files import write_file
from fleetkeeper_local.control_plane import probes

PUSH_TIMEOUT_S = 900


def write_registry_config(path: Path, data: Path, port: int) -> None:
    """Write docker-registry's configuration: one directory, loopback, deletions allowed."""
    document = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {
            "filesystem": {"rootdirectory": str(data)},
            "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    write_file(path, yaml.safe_dump(document))


def reference(port: int, name: str, tag: str) -> str:
    """Return the name by which pods pull an image: `localhost:PORT/NAME:TAG`, over plain HTTP."""
    return f"localhost:{port}/{name}:{tag}"


def has_image(port: int, name: str, tag: str) -> bool:
    """Return whether the registry has this tag."""
    tags = probes.fetch_json(f"http://127.0.0.1:{port}/v2/{name}/tags/list")
    return tags is not None and tag in (tags.get("tags") or ())


def push(source: str, port: int, name: str, tag: str) -> str:
    """Copy an image into the registry and return the name by which pods pull it.

    Args:
        source: skopeo's name of it: `oci:DIR:TAG`, `docker-archive:FILE`, `containers-
            storage:NAME`.
        port: the registry's.
        name: repository name.
        tag: its tag.

    Raises:
        LocalError: the copy failed; the text is skopeo's.
    """
    return copy(source, reference(port, name, tag), tls=False)


def copy(source: str, target: str, *, tls: bool) -> str:
    """Copy an image to `HOST/NAME:TAG` with the user's own login and return that name.

    Raises:
        LocalError: skopeo is missing, or the copy failed; the text is skopeo's.
    """
    argv = [
        "skopeo",
        "copy",
        "--insecure-policy",
        "--quiet",
        f"--dest-tls-verify={str(tls).lower()}",
    ]
    try:
        done = subprocess.run(
            [*argv, source, f"docker://{target}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PUSH_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise LocalError(
            "skopeo is not on the PATH; install it (Debian: apt-get install skopeo)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LocalError(
            f"copying the image to {target} timed out after {PUSH_TIMEOUT_S} s"
        ) from error
    if done.returncode:
        raise LocalError(f"cannot copy {source} to {target}: {done.stderr.strip()}")
    return target
