"""Settings come from a file and from the environment, and every mistake is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetkeeper.api.profiles.defaults import default_catalog
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.runtime.plan_context import plan_context
from fleetkeeper.runtime.settings import SettingsError, load_settings


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "POD_UID", "FLEETKEEPER_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_the_file_uses_camel_case_and_the_environment_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "logLevel: debug\nlistenPort: 9000\nrouter: {image: 'r:1'}\nmaxAccelerators: 4\n"
    )
    monkeypatch.setenv("FLEETKEEPER_LISTEN_PORT", "9001")
    monkeypatch.setenv("FLEETKEEPER_NAMESPACES", '["a", "b"]')
    settings = load_settings(file)
    assert (settings.log_level, settings.listen_port) == ("debug", 9001)
    assert settings.namespaces == ("a", "b")
    context = plan_context(settings)
    assert (context.router.image, context.max_accelerators) == ("r:1", 4)


def test_the_defaults_are_those_of_the_default_context() -> None:
    context = plan_context(load_settings())
    default = default_context()
    for name in default.__dataclass_fields__:
        assert getattr(context, name) == getattr(default, name), name


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("listenPort: many", "listenPort"),
        ("noSuchSetting: 1", "noSuchSetting"),
        ("leader: {renewDeadlineS: 14}", "durationS must exceed"),
        ("- a list", "must be a map"),
        ("a: [", "cannot read"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=str(file)) as caught:
        load_settings(file)
    assert named.lower() in str(caught.value).replace("_", "").lower()


def test_profiles_and_keys_come_from_files(tmp_path: Path) -> None:
    profiles, keys = tmp_path / "profiles.yaml", tmp_path / "jwks.json"
    profiles.write_text(default_catalog().model_dump_json(by_alias=True, exclude_none=True))
    keys.write_text('{"keys": []}\n')
    context = plan_context(load_settings(profiles_file=profiles, control_jwks_file=keys))
    assert context.catalog == default_catalog()
    assert json.loads(context.control_keys) == {"keys": []}


def test_profiles_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    file.write_text("aliases: {cuda: nothing}")
    with pytest.raises(SettingsError, match="nothing"):
        plan_context(load_settings(profiles_file=file))


def test_two_processes_are_never_the_same_but_a_restarted_container_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_settings().process_identity != load_settings().process_identity
    monkeypatch.setenv("POD_UID", "uid-1")
    assert load_settings().process_identity == load_settings().process_identity == "uid-1"


@pytest.mark.promise("keys-by-file")
def test_what_is_shown_at_start_names_key_files_and_never_reads_them(tmp_path: Path) -> None:
    secret = tmp_path / "key.pem"
    secret.write_text("CANARY")
    shown = json.dumps(load_settings(control_key_file=secret).shown)
    assert "CANARY" not in shown
    assert str(secret) in shown
