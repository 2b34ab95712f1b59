"""Logins to registries, from the files that docker, skopeo and Helm write."""

from __future__ import annotations

import base64
import binascii
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

DOCKER_HUB: Final = "docker.io"
HELPER_TIMEOUT_S: Final = 30.0


class BadLogin(Exception):
    """A login that cannot be used. The message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Login:
    """A user and a password (or token) for a registry."""

    user: str
    password: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The value of an `Authorization` header."""
        text = f"{self.user}:{self.password}".encode()
        return f"Basic {base64.b64encode(text).decode()}"


def find_login(host: str, repository: str) -> Login | None:
    """Return the login for a repository; None if no file has one.

    The most specific entry of the first file with an entry wins, as in skopeo.

    Raises:
        BadLogin: a file or its entry cannot be read, or its credential helper failed.
    """
    for path in _files():
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as problem:
            raise BadLogin(f"cannot read {path}: {problem}; log in again, or remove it") from None
        found = _in_file(document if isinstance(document, dict) else {}, host, repository, path)
        if found is not None:
            return found
    return None


def _files() -> Iterator[Path]:
    """Yield the files, in the order in which they are searched."""
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
        return
    home = Path.home()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    yield Path(runtime) / "containers/auth.json"
    yield Path(f"/run/containers/{os.getuid()}/auth.json")
    yield home / ".config/containers/auth.json"
    yield Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    yield Path(os.environ.get("HELM_REGISTRY_CONFIG") or home / ".config/helm/registry/config.json")


def _in_file(document: Mapping[str, Any], host: str, repository: str, path: Path) -> Login | None:
    entries = {_plain(key): value for key, value in (document.get("auths") or {}).items()}
    helpers = {_plain(key): value for key, value in (document.get("credHelpers") or {}).items()}
    for key in _keys(host, repository):
        if key in helpers:
            return _from_helper(helpers[key], host, path)
        entry = entries.get(key)
        if entry:
            return _from_entry(entry, key, path)
    # Docker writes an empty entry for a registry whose login is in its store.
    store = document.get("credsStore")
    return _from_helper(store, host, path) if store and host in entries else None


def _keys(host: str, repository: str) -> Iterator[str]:
    parts = [host, *repository.split("/")]
    for length in range(len(parts), 0, -1):
        yield "/".join(parts[:length])


def _plain(key: str) -> str:
    """Return a key as `HOST[/PATH]`; Docker Hub's is `https://index.docker.io/v1/`."""
    text = key.partition("://")[2] or key
    text = text.rstrip("/").removesuffix("/v1").removesuffix("/v2")
    return DOCKER_HUB if text in {"index.docker.io", "registry-1.docker.io"} else text


def _from_entry(entry: Mapping[str, Any], key: str, path: Path) -> Login:
    if entry.get("identitytoken"):
        raise BadLogin(
            f"{path}: the entry of {key} is an identity token, which this command does not use; "
            f"log in with a user and a password: skopeo login {key}"
        )
    try:
        user, colon, password = base64.b64decode(entry["auth"]).decode().partition(":")
    except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
        user = colon = password = ""
    if not colon:
        raise BadLogin(f"{path}: the entry of {key} has no valid `auth`; log in again")
    return Login(user, password.rstrip("\0"))


def _from_helper(name: str, host: str, path: Path) -> Login | None:
    """Ask docker's credential helper; None if it has no login for the registry."""
    program = f"docker-credential-{name}"
    server = "https://index.docker.io/v1/" if host == DOCKER_HUB else host
    try:
        done = subprocess.run(
            [program, "get"],
            input=server,
            capture_output=True,
            text=True,
            check=False,
            timeout=HELPER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise BadLogin(f"{path} names the credential helper {program}: {problem}") from None
    if done.returncode:
        if "credentials not found" in done.stdout + done.stderr:
            return None
        raise BadLogin(f"{program} failed for {server}: {(done.stderr or done.stdout).strip()}")
    answer = json.loads(done.stdout)
    return Login(answer["Username"], answer["Secret"])
