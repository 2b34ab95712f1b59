"""The gateway's signer: what it signs, with which key, and how it follows a rotation."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import jwt
import pytest

from fleetkeeper.adapters.keys import new_grant_keys, rotated_grant_keys
from fleetkeeper_contract.grants import GRANT_ISSUER, GRANT_TYPE, USAGE_TYPE
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.grants.attempts import AttemptChecker
from fleetkeeper_gateway.grants.keys import KeyFiles, NoGrantKeyError, read_keys
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.grants.signer import (
    GrantReader,
    Signer,
    UsageTokenSigner,
    create_key_files,
)
from fleetkeeper_gateway.interfaces import Service
from tests.support.engine.no_descriptors import no_file_can_be_opened

NOW = 1_900_000_000.0
SERVICE = Service(
    "team", "chat", "uid-1", ("chat",), "http://chat.team.svc:8000", True, "Ready", True, 0
)


class Clock:
    """A clock that a test moves; it serves as both clocks."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(directory: Path, files: dict[str, str]) -> None:
    """Replace all files, each as the kubelet does: another file under the same name."""
    for old in directory.iterdir():
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        new = directory / f".{name}"
        new.write_text(text)
        new.replace(directory / name)


def key_files(directory: Path, clock: Clock) -> KeyFiles:
    return KeyFiles(directory, clock, clock)


def sign(signer: Signer, hops: int = 1) -> str:
    return signer.sign(
        SERVICE,
        tier=Tier.BATCH,
        key_id="key-1",
        request_id="request-1",
        hops=hops,
    )


def claims_of(token: str, jwks: str, audience: str) -> dict[str, Any]:
    kid = jwt.get_unverified_header(token)["kid"]
    keys = {entry["kid"]: jwt.PyJWK(entry, algorithm="EdDSA") for entry in json.loads(jwks)["keys"]}
    options: Any = {"verify_exp": False, "verify_iat": False}
    return jwt.decode(token, keys[kid], algorithms=["EdDSA"], audience=audience, options=options)


def kid_of(token: str) -> str:
    return str(jwt.get_unverified_header(token)["kid"])


def test_a_grant_says_who_asks_for_what(tmp_path: Path, clock: Clock) -> None:
    files = new_grant_keys()
    write(tmp_path, files)
    keys = key_files(tmp_path, clock)
    signer = Signer(keys, clock)
    grant = sign(signer)
    assert jwt.get_unverified_header(grant)["typ"] == GRANT_TYPE
    claims = claims_of(grant, files["jwks.json"], "uid-1")
    attempt = claims.pop("jti")
    assert AttemptChecker(keys).is_ours(attempt, SERVICE.path, "request-1", "key-1", "batch")
    assert claims_of(sign(signer), files["jwks.json"], "uid-1")["jti"] != attempt
    assert claims == {
        "iss": GRANT_ISSUER,
        "aud": "uid-1",
        "rid": "request-1",
        "tier": "batch",
        "key": "key-1",
        "hops": 1,
        "iat": NOW,
        "exp": NOW + 60,
    }


def test_a_usage_token_is_for_one_pod_and_differs_each_time(tmp_path: Path, clock: Clock) -> None:
    files = new_grant_keys()
    write(tmp_path, files)
    signer = UsageTokenSigner(key_files(tmp_path, clock), clock)
    token, other = signer.sign("pod-1"), signer.sign("pod-1")
    assert jwt.get_unverified_header(token)["typ"] == USAGE_TYPE
    assert claims_of(token, files["jwks.json"], "pod-1")["exp"] == NOW + 60
    assert token != other


@pytest.mark.promise("signing-keys")
def test_a_rotation_changes_the_key_at_its_time_without_a_restart(
    tmp_path: Path, clock: Clock
) -> None:
    files = new_grant_keys()
    write(tmp_path, files)
    signer = Signer(key_files(tmp_path, clock), clock)
    first = kid_of(sign(signer))
    rotated = rotated_grant_keys(files, sign_from=NOW + 900, now=NOW)
    write(tmp_path, rotated)
    clock.now += 899
    assert kid_of(sign(signer)) == first
    clock.now += 1
    second = sign(signer)
    assert kid_of(second) != first
    assert claims_of(second, rotated["jwks.json"], "uid-1")["rid"] == "request-1"
    # The next rotation makes the key that signs by then the first of the files.
    clock.now += 3600
    again = rotated_grant_keys(rotated, sign_from=clock.now + 900, now=clock.now)
    write(tmp_path, again)
    assert kid_of(sign(signer)) == kid_of(second)
    assert first not in again["jwks.json"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("signing.pem", ""),
        ("signing.pem", "-----BEGIN PRIVATE KEY-----\n"),
        ("signing.pem", new_grant_keys()["signing.pem"]),
        ("jwks.json", '{"keys": []}'),
        ("jwks.json", "{"),
        ("next.pem", "x"),
        ("signFrom", "tomorrow"),
        ("signFrom", "2030-01-01T00:00:00"),
    ],
)
def test_files_that_cannot_be_read_leave_the_last_keys_in_force_and_are_logged_once(
    tmp_path: Path, clock: Clock, name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = new_grant_keys()
    write(tmp_path, files)
    signer = Signer(key_files(tmp_path, clock), clock)
    first = kid_of(sign(signer))
    rotated = rotated_grant_keys(files, sign_from=NOW - 1, now=NOW)
    write(tmp_path, {**rotated, name: text})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 5
            assert kid_of(sign(signer)) == first
    assert len(caplog.records) == 1
    assert name in caplog.text
    write(tmp_path, rotated)
    clock.now += 5
    assert kid_of(sign(signer)) != first


def test_without_keys_nothing_is_signed_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoGrantKeyError, match="GRANT_KEYS_DIRECTORY is not set"):
        sign(Signer(create_key_files(GrantSettings(grant_keys_directory=None))))
    with pytest.raises(NoGrantKeyError, match="signing-keys create"):
        create_key_files(GrantSettings(grant_keys_directory=tmp_path)).current()


def test_an_empty_variable_is_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Path("") would be the working directory."""
    monkeypatch.setenv("FLEETKEEPER_GATEWAY_GRANT_KEYS_DIRECTORY", "")
    assert GrantSettings().grant_keys_directory is None


def test_a_private_key_among_the_public_ones_is_refused(tmp_path: Path) -> None:
    files = new_grant_keys()
    jwks = json.loads(files["jwks.json"])
    jwks["keys"][0]["d"] = "secret"
    write(tmp_path, {**files, "jwks.json": json.dumps(jwks)})
    with pytest.raises(ValueError, match="public"):
        read_keys(tmp_path)


@pytest.mark.promise("gateway-hops")
def test_hops_are_read_from_own_grants_alone(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, new_grant_keys())
    keys = key_files(tmp_path, clock)
    reader, signer = GrantReader(keys, clock), Signer(keys, clock)
    assert reader.hops_of(sign(signer, hops=2)) == 2
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    write(foreign, new_grant_keys())
    assert reader.hops_of(sign(Signer(key_files(foreign, clock), clock))) is None
    assert reader.hops_of(UsageTokenSigner(keys, clock).sign("pod-1")) is None
    for text in ("", "a.b.c", "x" * 5000, "é"):
        assert reader.hops_of(text) is None
    old = sign(signer)
    clock.now += 66
    assert reader.hops_of(old) is None


def test_the_files_are_not_read_again_without_a_change(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, new_grant_keys())
    keys = key_files(tmp_path, clock)
    first = keys.keys()
    clock.now += 10
    assert keys.keys() is first
    os.utime(tmp_path / "signing.pem", ns=(1, 1))
    clock.now += 10
    assert keys.keys() is not first


def test_a_change_that_could_not_be_read_is_read_later(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients may hold all descriptors of the process in the second of a rotation."""
    files = new_grant_keys()
    write(tmp_path, files)
    signer = Signer(key_files(tmp_path, clock), clock)
    first = kid_of(sign(signer))
    write(tmp_path, rotated_grant_keys(files, sign_from=NOW - 1, now=NOW))
    starting = Signer(key_files(tmp_path, clock), clock)
    with caplog.at_level(logging.WARNING), no_file_can_be_opened():
        for _ in range(3):
            clock.now += 5
            assert kid_of(sign(signer)) == first
            with pytest.raises(NoGrantKeyError):
                sign(starting)
    assert len(caplog.records) == 2
    clock.now += 5
    assert kid_of(sign(signer)) == kid_of(sign(starting)) != first
