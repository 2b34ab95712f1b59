"""Control keys, the check of profiles, and YAML that kubectl reads as it was meant."""

from __future__ import annotations

import json
import stat
from base64 import urlsafe_b64decode
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from typer.testing import CliRunner

from fleetkeeper.adapters.keys import (
    new_control_keys,
    new_grant_keys,
    public_jwk,
    rotated_grant_keys,
)
from fleetkeeper.cli import app
from fleetkeeper.commands.service.render import yaml_text

RUN = CliRunner()


def test_a_key_is_named_by_its_thumbprint() -> None:
    """The example of RFC 8037, appendix A.3."""
    text = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
    jwk = public_jwk(Ed25519PublicKey.from_public_bytes(urlsafe_b64decode(f"{text}=")))
    assert jwk["x"] == text
    assert jwk["kid"] == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_the_public_key_is_that_of_the_private_one_and_nothing_private_is_published() -> None:
    """Engines get the set; the operator alone holds the other half."""
    keys = new_control_keys()
    private = load_pem_private_key(keys.private_pem.encode(), password=None)
    (published,) = json.loads(keys.jwks)["keys"]
    assert published == public_jwk(private.public_key())  # type: ignore[arg-type]
    assert "d" not in published
    assert new_control_keys().jwks != keys.jwks


def test_keys_are_written_for_their_owner_and_never_over_others(tmp_path: Path) -> None:
    """A second run fails and changes nothing."""
    folder = tmp_path / "keys"
    assert RUN.invoke(app, ["signing-keys", "create", "--directory", str(folder)]).exit_code == 0
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(before) == {"key.pem", "jwks.json"}
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    again = RUN.invoke(app, ["signing-keys", "create", "--directory", str(folder)])
    assert again.exit_code == 1
    assert "key.pem" in again.output
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_grant_keys_are_written_for_their_owner(tmp_path: Path) -> None:
    """Beside control keys, in one call."""
    control, grant = tmp_path / "control", tmp_path / "grant"
    arguments = ["--directory", str(control), "--grant-directory", str(grant)]
    assert RUN.invoke(app, ["signing-keys", "create", *arguments]).exit_code == 0
    assert {path.name for path in grant.iterdir()} == {"signing.pem", "jwks.json"}
    assert stat.S_IMODE((grant / "signing.pem").stat().st_mode) == 0o600
    assert (control / "jwks.json").read_text() != (grant / "jwks.json").read_text()


def test_keys_go_somewhere() -> None:
    found = RUN.invoke(app, ["signing-keys", "create"])
    assert found.exit_code == 2
    assert "--grant-secret" in found.output


@pytest.mark.parametrize("after", ["", "15", "m", "-5m", "15 m", "1d", "1e3s"])
def test_a_time_that_cannot_be_read_is_reported(after: str) -> None:
    """Before anything is asked of a cluster."""
    arguments = ["--grant-secret", "keys", "--after", after]
    found = RUN.invoke(app, ["signing-keys", "rotate", *arguments])
    assert found.exit_code == 2
    assert "15m" in found.output


def test_a_rotation_adds_a_key_and_the_next_one_removes_the_old() -> None:
    """At most three public keys: the new one, the one that signs, and one that just stopped."""
    first = new_grant_keys()
    second = rotated_grant_keys(first, sign_from=1000.0, now=100.0)
    kids = [entry["kid"] for entry in json.loads(second["jwks.json"])["keys"]]
    assert len(kids) == 2
    assert json.loads(first["jwks.json"])["keys"][0]["kid"] == kids[1]
    assert second["signing.pem"] == first["signing.pem"]
    assert second["signFrom"] == "1970-01-01T00:16:40Z"
    with pytest.raises(ValueError, match="under way"):
        rotated_grant_keys(second, sign_from=2000.0, now=999.0)
    soon = rotated_grant_keys(second, sign_from=2000.0, now=1065.0)
    late = rotated_grant_keys(second, sign_from=2000.0, now=1066.0)
    for third, count in ((soon, 3), (late, 2)):
        assert third["signing.pem"] == second["next.pem"]
        named = [entry["kid"] for entry in json.loads(third["jwks.json"])["keys"]]
        assert named[1] == kids[0]
        assert len(named) == count


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("signing.pem", "", "signing.pem is missing"),
        ("signing.pem", "x", "not an Ed25519 key"),
        ("signing.pem", new_grant_keys()["signing.pem"], "does not hold the key that signs"),
        ("jwks.json", "", "jwks.json is missing"),
        ("jwks.json", "[]", "not a JWKS"),
        ("jwks.json", '{"keys": [1]}', "not a JWKS"),
    ],
)
def test_keys_that_do_not_match_are_not_rotated(name: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rotated_grant_keys({**new_grant_keys(), name: text}, sign_from=2.0, now=1.0)


@pytest.mark.parametrize(
    ("text", "code"), [(None, 66), ("profiles: [{name: x}]", 64), ("profiles: [", 64)]
)
def test_profiles_that_cannot_be_read_are_reported(
    tmp_path: Path, text: str | None, code: int
) -> None:
    """Before anything is asked of a cluster."""
    file = tmp_path / "profiles.yaml"
    if text is not None:
        file.write_text(text)
    found = RUN.invoke(app, ["profiles-in-use", "--profiles", str(file)])
    assert found.exit_code == code
    assert str(file) in found.output


LOOKS_LIKE_ANOTHER = (
    "y N yes true null ~ 1e3 12345678e9012345 0o17 0X1F 1_000 12 1.5 .5 -1 +2 2001-01-01 12:30 = "
    "0b1 1_0e5"
)


@pytest.mark.parametrize("text", ["", *LOOKS_LIKE_ANOTHER.split()])
def test_texts_that_look_like_something_else_are_quoted(text: str) -> None:
    """kubectl reads more plain words as truths and numbers than Python does."""
    written = yaml_text([{"value": text}])
    assert yaml.safe_load(written) == {"value": text}
    assert written.splitlines()[1] in {f"value: '{text}'", f'value: "{text}"'}


@pytest.mark.parametrize(("value", "line"), [(True, "true"), (12, "12"), ("chat", "chat")])
def test_truths_numbers_and_words_stay_plain(value: object, line: str) -> None:
    """Quotes only where they are needed."""
    assert yaml_text([{"value": value}]).splitlines()[1] == f"value: {line}"
