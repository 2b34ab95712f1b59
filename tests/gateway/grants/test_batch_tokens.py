"""Tokens of the batch process: what is accepted, and everything that is not."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper_contract.grants import (
    BATCH_AUDIENCE,
    BATCH_ISSUER,
    BATCH_TYPE,
    GRANT_LEEWAY_SECONDS,
    GRANT_TYPE,
    KEY_CLAIM,
    USAGE_TYPE,
)
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.grants.refusals import GrantRefusedError
from fleetkeeper_engine.in_vllm.http.grants.signatures import GrantVerifier
from fleetkeeper_gateway.grants.keys import KeyFiles, read_keys
from fleetkeeper_gateway.grants.signer import (
    BatchTokenReader,
    BatchTokenSigner,
    GrantReader,
    Signer,
    UsageTokenSigner,
)
from fleetkeeper_gateway.interfaces import Service

NOW = 1_900_000_000
CLAIMS = {
    "iss": BATCH_ISSUER,
    "aud": BATCH_AUDIENCE,
    KEY_CLAIM: "key-1",
    "iat": NOW,
    "exp": NOW + 60,
}


class Clock:
    """A clock that a test moves; it serves as both clocks."""

    def __init__(self) -> None:
        self.now = float(NOW)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, text in new_grant_keys().items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def keys(directory: Path, clock: Clock) -> KeyFiles:
    return KeyFiles(directory, clock, clock)


@pytest.fixture
def reader(keys: KeyFiles, clock: Clock) -> BatchTokenReader:
    return BatchTokenReader(keys, clock)


Make = Callable[..., str]


@pytest.fixture
def make(directory: Path) -> Make:
    """Signs a token with the right key; a test changes one thing."""
    signing = read_keys(directory).signing

    def made(
        typ: str = BATCH_TYPE,
        kid: str = signing.kid,
        private: Ed25519PrivateKey = signing.private,
        **claims: Any,
    ) -> str:
        all_claims = {name: value for name, value in {**CLAIMS, **claims}.items() if value != ...}
        return jwt.encode(all_claims, private, algorithm="EdDSA", headers={"typ": typ, "kid": kid})

    return made


def test_a_token_of_ours_names_its_key(
    keys: KeyFiles, reader: BatchTokenReader, clock: Clock, make: Make
) -> None:
    assert reader.key_of(BatchTokenSigner(keys, clock).sign("key-1")) == "key-1"
    assert reader.key_of(make()) == "key-1"


@pytest.mark.promise("batch-tokens")
def test_a_token_ends(reader: BatchTokenReader, clock: Clock, make: Make) -> None:
    token = make()
    clock.now = NOW + 60 + GRANT_LEEWAY_SECONDS
    assert reader.key_of(token) == "key-1"
    clock.now += 1
    assert reader.key_of(token) is None
    clock.now = NOW - GRANT_LEEWAY_SECONDS - 1
    assert reader.key_of(token) is None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"typ": GRANT_TYPE}, id="type-of-a-grant"),
        pytest.param({"typ": USAGE_TYPE}, id="type-of-usage"),
        pytest.param({"typ": "JWT"}, id="no-type-of-ours"),
        pytest.param({"kid": "other"}, id="unknown-key"),
        pytest.param({"private": Ed25519PrivateKey.generate()}, id="signed-by-another-key"),
        pytest.param({"aud": "uid-1"}, id="audience-of-a-grant"),
        pytest.param({"aud": [BATCH_AUDIENCE, "x"]}, id="several-audiences"),
        pytest.param({"aud": ...}, id="no-audience"),
        pytest.param({"iss": "fleetkeeper-gateway"}, id="issuer-of-a-grant"),
        pytest.param({"exp": NOW + 61}, id="too-long"),
        pytest.param({"exp": NOW, "iat": NOW}, id="no-time"),
        pytest.param({"iat": NOW - 100, "exp": NOW - 40}, id="expired"),
        pytest.param({"iat": NOW + 100, "exp": NOW + 160}, id="from-the-future"),
        pytest.param({"exp": ...}, id="no-end"),
        pytest.param({"iat": ...}, id="no-beginning"),
        pytest.param({"exp": True}, id="end-is-no-number"),
        pytest.param({KEY_CLAIM: ...}, id="no-key"),
        pytest.param({KEY_CLAIM: 7}, id="key-is-no-text"),
    ],
)
def test_what_differs_in_one_thing_is_refused(
    reader: BatchTokenReader, make: Make, changes: dict[str, Any]
) -> None:
    assert reader.key_of(make(**changes)) is None


@pytest.mark.parametrize("token", ["", "a.b.c", "fk_x", "é.é.é", "." * 5000, "eyJ9.e30."])
def test_garbage_is_refused(reader: BatchTokenReader, token: str) -> None:
    assert reader.key_of(token) is None


def test_a_token_without_a_signature_is_refused(reader: BatchTokenReader, keys: KeyFiles) -> None:
    kid = keys.current().kid
    headers = {"typ": BATCH_TYPE, "kid": kid}
    token = jwt.encode(CLAIMS, "", algorithm="none", headers=headers)
    assert reader.key_of(token) is None


def test_without_keys_no_token_is_accepted(make: Make, clock: Clock) -> None:
    assert BatchTokenReader(KeyFiles(None, clock, clock), clock).key_of(make()) is None


def test_neither_a_grant_nor_a_token_passes_for_the_other(
    keys: KeyFiles, reader: BatchTokenReader, clock: Clock
) -> None:
    service = Service("t", "c", BATCH_AUDIENCE, ("m",), "http://c", True, "Ready", True, 0)
    grant = Signer(keys, clock).sign(
        service, tier=Tier.REALTIME, key_id="key-1", request_id="r", hops=1
    )
    assert reader.key_of(grant) is None
    assert reader.key_of(UsageTokenSigner(keys, clock).sign(BATCH_AUDIENCE)) is None
    token = BatchTokenSigner(keys, clock).sign("key-1")
    assert GrantReader(keys, clock).hops_of(token) is None
    found = keys.keys()
    assert found is not None
    trusted = {
        kid: urlsafe_b64encode(key.public_bytes_raw()).rstrip(b"=").decode()
        for kid, key in found.trusted.items()
    }
    engine = GrantVerifier(BATCH_AUDIENCE, trusted)
    assert engine.verify(grant, clock.now).key == "key-1"
    with pytest.raises(GrantRefusedError):
        engine.verify(token, clock.now)
