"""The gateway's public keys, read from a file that changes: what is accepted, and what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper.runtime import grant_keys
from fleetkeeper.runtime.grant_keys import GrantKeysFile, read_grant_keys
from fleetkeeper.runtime.plan_context import plan_context
from fleetkeeper.runtime.settings import SettingsError, load_settings

JWKS = new_grant_keys()["jwks.json"]
(JWK,) = json.loads(JWKS)["keys"]


def written(file: Path, *keys: object) -> Path:
    draft = file.with_name(".draft")
    draft.write_text(json.dumps({"keys": keys}))
    return draft.replace(file)


def test_keys_are_reduced_to_what_engines_need(tmp_path: Path) -> None:
    """Equal keys are equal texts, so that another order of fields causes no write."""
    file = written(tmp_path / "jwks.json", {**JWK, "more": 1})
    text = read_grant_keys(file)
    assert json.loads(text)["keys"] == [{name: JWK[name] for name in ("crv", "kid", "kty", "x")}]
    written(file, dict(reversed(JWK.items())))
    assert read_grant_keys(file) == text


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ((), "1 to 3 keys"),
        ((JWK,) * 4, "1 to 3 keys"),
        ((JWK, JWK), "kid of its own"),
        (({**JWK, "d": "secret"},), "private key"),
        (({**JWK, "crv": "P-256"},), "only Ed25519"),
        (({**JWK, "kid": ""},), "kid and x"),
        (({**JWK, "x": 1},), "kid and x"),
        (({**JWK, "x": JWK["x"] + "="},), "32 bytes"),
        (({**JWK, "x": "short"},), "32 bytes"),
        (("text",), "only Ed25519"),
    ],
)
def test_what_engines_would_refuse_is_refused_here(
    tmp_path: Path, keys: tuple[object, ...], says: str
) -> None:
    file = written(tmp_path / "jwks.json", *keys)
    with pytest.raises(ValueError, match=says):
        read_grant_keys(file)
    with pytest.raises(SettingsError, match="grant keys"):
        plan_context(load_settings(grant_jwks_file=file))


def test_without_the_setting_there_is_no_gateway(tmp_path: Path) -> None:
    assert plan_context(load_settings()).grant_keys == ""
    with pytest.raises(SettingsError, match="absent"):
        plan_context(load_settings(grant_jwks_file=tmp_path / "absent"))


async def test_changes_are_passed_on_and_invalid_files_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grant_keys, "CHECK_PERIOD_S", 0.01)
    file = written(tmp_path / "jwks.json", JWK)
    other = json.loads(new_grant_keys()["jwks.json"])["keys"][0]
    seen: list[int] = []
    changed = asyncio.Event()

    def note(text: str) -> None:
        seen.append(len(json.loads(text)["keys"]))
        changed.set()

    async def until(change: Callable[[], object]) -> None:
        changed.clear()
        change()
        async with asyncio.timeout(60):
            await changed.wait()

    task = asyncio.create_task(GrantKeysFile(file, note).keep())
    async with asyncio.timeout(60):
        await changed.wait()
    await until(lambda: written(file, other, JWK))
    written(file)
    file.unlink()
    await until(lambda: written(file, other))
    task.cancel()
    assert seen == [1, 2, 1]
    await GrantKeysFile(None, note).keep()
