"""Whose requests a pod accepts: every way a token can be wrong, and rotation without a gap."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper_engine.supervisor.control_api.auth import (
    UnauthorizedError,
    Verifier,
    parse_keys,
    read_keys,
)
from tests.support.engine.signer import ISSUER, Signer

POD = "1b1c-uid"
NOW = 1_800_000_000.0


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path)


@pytest.fixture
def verifier(signer: Signer) -> Verifier:
    found = Verifier(POD, ISSUER)
    found.trust(read_keys(signer.directory))
    return found


def bearer(signer: Signer, **claims: Any) -> str:
    return f"Bearer {signer.token(POD, **{'iat': NOW, **claims})}"


@pytest.mark.promise("limits-tokens")
def test_a_fresh_token_is_taken_once(signer: Signer, verifier: Verifier) -> None:
    header = bearer(signer, epoch=3)
    accepted = verifier.verify(header, NOW)
    assert (accepted.epoch, accepted.kid) == (3, "one")
    with pytest.raises(UnauthorizedError, match="used before"):
        verifier.verify(header, NOW + 1)


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"aud": "another-pod"}, "not valid"),
        ({"aud": [POD, "another-pod"]}, "not valid"),
        ({"iss": "somebody"}, "not valid"),
        ({"iat": NOW - 91}, "too old"),
        ({"iat": NOW + 31}, "future"),
        ({"iat": "now"}, "too old|not valid"),
        ({"iat": True}, "too old"),
        ({"iat": float("nan")}, "too old|not valid"),
        ({"epoch": None}, "no epoch"),
        ({"epoch": "7"}, "no epoch"),
        ({"epoch": -1}, "no epoch"),
        ({"jti": "short"}, "jti"),
        ({"jti": "x" * 200}, "jti"),
    ],
)
def test_a_wrong_claim_is_refused(
    signer: Signer, verifier: Verifier, claims: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnauthorizedError, match=says):
        verifier.verify(bearer(signer, **claims), NOW)


@pytest.mark.promise("signed-limits")
@pytest.mark.parametrize("age_s", [-30.0, 0.0, 60.0, 90.0])
def test_a_token_may_be_60_s_old_and_clocks_30_s_apart(
    signer: Signer, verifier: Verifier, age_s: float
) -> None:
    verifier.verify(bearer(signer, iat=NOW - age_s), NOW)


@pytest.mark.parametrize("name", ["iss", "aud", "iat", "jti"])
def test_a_missing_claim_is_refused(verifier: Verifier, tmp_path: Path, name: str) -> None:
    key = Ed25519PrivateKey.generate()
    public = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key()))
    verifier.trust(parse_keys(json.dumps({"keys": [{**public, "kid": "k"}]})))
    claims = {"iss": ISSUER, "aud": POD, "iat": NOW, "jti": secrets.token_hex(8), "epoch": 1}
    del claims[name]
    token = jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": "k"})
    with pytest.raises(UnauthorizedError):
        verifier.verify(f"Bearer {token}", NOW)


@pytest.mark.promise("limits-tokens")
def test_an_older_leader_is_refused_once_a_newer_one_spoke(
    signer: Signer, verifier: Verifier
) -> None:
    verifier.verify(bearer(signer, epoch=5), NOW)
    with pytest.raises(UnauthorizedError, match=r"epoch 4\b.*\b5\b"):
        verifier.verify(bearer(signer, epoch=4), NOW)
    verifier.verify(bearer(signer, epoch=5), NOW)


def test_a_token_by_a_key_that_is_not_published_is_refused(
    verifier: Verifier, tmp_path: Path
) -> None:
    stranger = Signer(tmp_path / "stranger")
    same_kid = bearer(stranger)
    with pytest.raises(UnauthorizedError, match="not valid"):
        verifier.verify(same_kid, NOW)
    with pytest.raises(UnauthorizedError, match="not trusted"):
        verifier.verify(bearer(Signer(tmp_path / "other", kid="two")), NOW)


def test_a_symmetric_or_unsigned_token_is_refused(signer: Signer, verifier: Verifier) -> None:
    """The classic confusions: HS256 with the public key as secret, and `none`."""
    claims = {"iss": ISSUER, "aud": POD, "iat": NOW, "jti": secrets.token_hex(8), "epoch": 1}
    secret = signer.jwk["x"].ljust(32, "x")
    for token in (
        jwt.encode(claims, secret, algorithm="HS256", headers={"kid": "one"}),
        jwt.encode(claims, "", algorithm="none", headers={"kid": "one"}),
    ):
        with pytest.raises(UnauthorizedError):
            verifier.verify(f"Bearer {token}", NOW)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer x.y.z", "Bearer " + "a" * 5000]
)
def test_what_is_no_token_is_refused(verifier: Verifier, header: str | None) -> None:
    with pytest.raises(UnauthorizedError):
        verifier.verify(header, NOW)


def test_rotation_never_locks_the_operator_out(tmp_path: Path) -> None:
    """Publish both, sign with either, remove the old one: then only the new one counts."""
    old, new = Signer(tmp_path / "old", "old"), Signer(tmp_path / "new", "new")
    verifier = Verifier(POD, ISSUER)
    verifier.trust(parse_keys(json.dumps({"keys": [old.jwk, new.jwk]})))
    assert verifier.kids == ("new", "old")
    verifier.verify(bearer(old), NOW)
    verifier.verify(bearer(new), NOW)
    verifier.trust(parse_keys(json.dumps({"keys": [new.jwk]})))
    with pytest.raises(UnauthorizedError, match="not trusted"):
        verifier.verify(bearer(old), NOW)


def test_used_tokens_are_forgotten_when_they_are_too_old_anyway(
    signer: Signer, verifier: Verifier
) -> None:
    """The memory of a pod that gets requests every few seconds for months stays small."""
    for second in range(0, 2000, 10):
        verifier.verify(bearer(signer, iat=NOW + second), NOW + second)
    assert len(verifier._used) <= 13


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [{"kty": "RSA", "kid": "a"}],
        [{"kty": "OKP", "crv": "X25519", "kid": "a", "x": "AA"}],
        [{"kty": "OKP", "crv": "Ed25519", "kid": "", "x": "AA"}],
        [{"kty": "OKP", "crv": "Ed25519", "kid": "a", "x": "!!"}],
    ],
)
def test_what_is_no_key_set_is_refused(keys: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match=r"keys?\b|kid|OKP"):
        parse_keys(json.dumps({"keys": keys}))


def test_a_published_private_key_and_too_many_keys_are_refused(tmp_path: Path) -> None:
    one = Signer(tmp_path)
    with pytest.raises(ValueError, match="private"):
        parse_keys(json.dumps({"keys": [{**one.jwk, "d": "secret"}]}))
    many = [{**one.jwk, "kid": str(number)} for number in range(4)]
    with pytest.raises(ValueError, match="1 to 3"):
        parse_keys(json.dumps({"keys": many}))
    assert read_keys(tmp_path / "nowhere") == {}


def test_the_wall_clock_of_today_works(signer: Signer, verifier: Verifier) -> None:
    verifier.verify(f"Bearer {signer.token(POD)}", time.time())
