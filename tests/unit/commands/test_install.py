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

from fleetkeeper.adapters.keys import new_control_keys, public_jwk
from fleetkeeper.cli import app
from fleetkeeper.commands.render import yaml_text

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
    assert RUN.invoke(app, ["keys", "--directory", str(folder)]).exit_code == 0
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(before) == {"key.pem", "jwks.json"}
    assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    again = RUN.invoke(app, ["keys", "--directory", str(folder)])
    assert again.exit_code == 1
    assert "key.pem" in again.output
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


@pytest.mark.parametrize("arguments", [[], ["--directory", "a", "--secret", "b"]])
def test_keys_go_to_one_place(arguments: list[str]) -> None:
    """Neither none nor two."""
    assert RUN.invoke(app, ["keys", *arguments]).exit_code == 2


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
