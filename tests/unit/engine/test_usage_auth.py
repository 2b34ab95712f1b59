"""Who may read an engine's usage: tokens of the gateway for this pod, and no grant."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.control_api.auth import UnauthorizedError, Verifier
from fleetkeeper_engine.supervisor.control_api.usage_auth import UsageVerifier
from fleetkeeper_engine.supervisor.control_files import ControlFiles
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.state import PodState
from tests.support.engine.grants import GrantKey, grants_text, write_grants
from tests.support.engine.signer import ISSUER, Signer

POD = "pod-uid"
NOW = 1_800_000_000.0
KEY = GrantKey(lambda: NOW)


@pytest.fixture
def verifier() -> UsageVerifier:
    found = UsageVerifier(POD)
    found.trust({KEY.jwk["kid"]: KEY.jwk["x"]})
    return found


def test_a_token_for_this_pod_is_accepted_until_it_expires(verifier: UsageVerifier) -> None:
    """It only reads, so it may be sent again."""
    header = f"Bearer {KEY.usage_token(POD)}"
    for moment in (NOW - 5, NOW, NOW, NOW + 65):
        assert verifier.verify(header, moment) == KEY.jwk["kid"]
    for moment in (NOW - 6, NOW + 66):
        with pytest.raises(UnauthorizedError, match="expired"):
            verifier.verify(header, moment)


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "another-pod"},
        {"aud": [POD]},
        {"iss": "somebody"},
        {"exp": None},
        {"exp": NOW + 61},
        {"exp": NOW},
        {"iat": True},
        {"header": {"typ": "JWT"}},
        {"header": {"kid": "another"}},
    ],
)
def test_another_token_is_refused(verifier: UsageVerifier, claims: dict[str, Any]) -> None:
    with pytest.raises(UnauthorizedError):
        verifier.verify(f"Bearer {KEY.usage_token(POD, **claims)}", NOW)


@pytest.mark.promise("grant-audience")
def test_a_grant_is_no_token_for_usage_and_nothing_is_none(verifier: UsageVerifier) -> None:
    header = f"Bearer {KEY.grant(aud=POD)}"
    for text in (header, None, "", "Bearer", "Bearer a.b.c", f"Basic {KEY.usage_token(POD)}"):
        with pytest.raises(UnauthorizedError):
            verifier.verify(text, NOW)


def test_a_key_that_cannot_be_read_leaves_the_others_trusted(verifier: UsageVerifier) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        verifier.trust({"short": "AAAA"})
    assert verifier.verify(f"Bearer {KEY.usage_token(POD)}", NOW) == KEY.jwk["kid"]


def test_the_keys_come_from_the_file_that_the_engine_follows(tmp_path: Path) -> None:
    """A half-written file leaves the last keys in force; without the file nobody may read."""
    signer = Signer(tmp_path)
    document = {
        "contract": 1,
        "accelerator": "cpu",
        "model": {"source": "/m", "servedName": "m"},
        "control": {"keysDirectory": str(tmp_path)},
    }
    region = Region.create(tmp_path / "region")
    pod = PodState(parse_document(json.dumps(document)), region, MemoryState(0.8))
    usage, limits = UsageVerifier(POD), Verifier(POD, ISSUER)
    files = ControlFiles(limits, usage, pod)
    key = GrantKey()

    def accepts() -> bool:
        try:
            usage.verify(f"Bearer {key.usage_token(POD)}", time.time())
        except UnauthorizedError:
            return False
        return True

    files.apply()
    assert not accepts()
    assert limits.kids == (signer.kid,)
    for text, expected in (
        (grants_text(key, demanded=False), True),
        ("{", True),
        (grants_text(GrantKey()), False),
        (grants_text(key), True),
    ):
        file = write_grants(tmp_path, text)
        files.apply()
        assert accepts() is expected
    file.unlink()
    files.apply()
    assert not accepts()
