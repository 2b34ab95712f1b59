"""Names of images, and the logins that docker, skopeo and Helm left on the machine."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper.adapters.registry.logins import BadLogin, Login, find_login
from fleetkeeper.adapters.registry.names import Place, Reference, is_loopback

DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without logins."""
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "HELM_REGISTRY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


def _write(path: Path, **document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def _entry(user: str, password: str = "p") -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    "text",
    [
        f"docker.io/vllm/vllm-openai@{DIGEST}",
        f"r.example.com:5000/a/b:1@{DIGEST}",
        f"registry:5000/a_b/c--d@{DIGEST}",
        f"localhost/a@{DIGEST}",
        f"[::1]:5000/a@{DIGEST}",
    ],
)
def test_a_name_with_a_digest_is_read_and_written_back(text: str) -> None:
    assert str(Reference.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "docker.io/a:1",
        f"a@{DIGEST}",
        f"a/b@{DIGEST}",
        f"https://r.example.com/a@{DIGEST}",
        f"r.example.com/a@sha256:{'a' * 63}",
        f"r.example.com/a/../b@{DIGEST}",
        f"r.example.com/A@{DIGEST}",
    ],
)
def test_a_name_without_registry_or_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST/NAME"):
        Reference.parse(text)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("m.example.com", "m.example.com/o/a:1"),
        ("m.example.com/", "m.example.com/o/a:1"),
        ("localhost:5000/x/y", "localhost:5000/x/y/o/a:1"),
    ],
)
def test_a_copy_keeps_path_tag_and_digest_below_the_new_place(place: str, name: str) -> None:
    copy = Reference.parse(f"r.example.com/o/a:1@{DIGEST}").at(Place.parse(place))
    assert str(copy) == f"{name}@{DIGEST}"


@pytest.mark.parametrize("text", ["", "https://m.example.com", "mirror", "m.example.com/A", "a b"])
def test_a_place_is_a_registry_and_a_path(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST"):
        Place.parse(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost:1", True), ("127.0.0.2", True), ("[::1]:1", True), ("127.example.com", False)],
)
def test_only_loopback_has_no_tls(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_without_files_there_is_no_login() -> None:
    assert find_login("r.example.com", "a/b") is None


@pytest.mark.parametrize(
    "name",
    [
        "run/containers/auth.json",
        ".config/containers/auth.json",
        ".docker/config.json",
        ".config/helm/registry/config.json",
    ],
)
def test_the_files_of_skopeo_docker_and_helm_are_found(home: Path, name: str) -> None:
    _write(home / name, auths={"r.example.com": _entry("user", "a:b")})
    assert find_login("r.example.com", "a/b") == Login("user", "a:b")
    assert find_login("other.example.com", "a/b") is None


def test_a_file_named_by_the_environment_is_the_only_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(home / ".docker/config.json", auths={"r.example.com": _entry("docker")})
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(home / "mine.json"))
    assert find_login("r.example.com", "a") is None
    _write(home / "mine.json", auths={"r.example.com": _entry("mine")})
    assert find_login("r.example.com", "a") == Login("mine", "p")


def test_the_longest_path_wins(home: Path) -> None:
    hosts = {"r.example.com": _entry("all"), "r.example.com/team/x": _entry("x")}
    _write(home / ".docker/config.json", auths=hosts)
    assert find_login("r.example.com", "team/x/y") == Login("x", "p")
    assert find_login("r.example.com", "team/xy") == Login("all", "p")


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io"])
def test_docker_hub_has_two_names(home: Path, key: str) -> None:
    _write(home / ".docker/config.json", auths={key: _entry("hub")})
    assert find_login("docker.io", "library/debian") == Login("hub", "p")


def _helper(home: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = home / "bin/docker-credential-mine"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nread -r host\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    "document",
    [
        {"credHelpers": {"r.example.com": "mine"}},
        {"credsStore": "mine", "auths": {"r.example.com": {}}},
    ],
)
def test_a_credential_helper_of_docker_is_asked(
    home: Path, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
) -> None:
    _helper(home, monkeypatch, 'echo "{\\"Username\\": \\"$host\\", \\"Secret\\": \\"s\\"}"')
    _write(home / ".docker/config.json", **document)
    assert find_login("r.example.com", "a") == Login("r.example.com", "s")
    assert find_login("other.example.com", "a") is None


def test_a_helper_without_a_login_is_no_error_and_a_failed_one_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(home / ".docker/config.json", credHelpers={"r.example.com": "mine"})
    with pytest.raises(BadLogin, match="docker-credential-mine"):
        find_login("r.example.com", "a")
    _helper(home, monkeypatch, "echo credentials not found in native keychain; exit 1")
    assert find_login("r.example.com", "a") is None
    (home / "bin/docker-credential-mine").write_text("#!/bin/sh\necho locked >&2; exit 1\n")
    with pytest.raises(BadLogin, match="locked"):
        find_login("r.example.com", "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ('{"auths": {"r.example.com": {"auth": "!"}}}', "no valid `auth`"),
        ('{"auths": {"r.example.com": {"identitytoken": "t"}}}', "identity token"),
    ],
)
def test_a_login_that_cannot_be_used_is_named_with_its_file(
    home: Path, text: str, message: str
) -> None:
    path = home / ".docker/config.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadLogin, match=message) as problem:
        find_login("r.example.com", "a")
    assert str(path) in str(problem.value)


def test_a_password_is_not_part_of_what_is_printed() -> None:
    assert "hidden" not in repr(Login("user", "hidden"))
