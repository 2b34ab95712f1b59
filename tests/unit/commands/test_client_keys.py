"""`fleetkeeper keys` before it asks a cluster: arguments, manifests and the table."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from fleetkeeper.cli import app
from fleetkeeper.commands.keys.client_key_secrets import encoded, key_of, manifest_of
from fleetkeeper.commands.keys.client_keys import COLUMNS, table_of
from fleetkeeper_contract.client_key_entries import ClientKey, digest_of, is_key

RUN = CliRunner()
NOW = 1_893_456_000.0
KEY = ClientKey(name="Chat", digests=("ab" * 32,), namespaces=("team-a",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Chat", "-n", "a"], "lower-case"),
        (["anonymous", "-n", "a"], "anonymous"),
        (["chat", "-n", "*"], "without patterns"),
        (["chat", "-n", "a", "--model", "a b"], "globs"),
        (["chat", "-n", "a", "--highest-tier", "fast"], "realtime, standard, batch"),
        (["chat", "-n", "a", "--expires", "soon"], "90d"),
        (["chat", "-n", "a", "--expires", "2020-01-01T00:00:00Z"], "past"),
        (["chat", "-n", "a", "--expires", "0d"], "90d"),
        (["chat", "-n", "a", "--requests-per-minute", "0"], "requestsPerMinute"),
        (["chat", "-n", "a", "--concurrency", "fast=1"], "concurrency"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_printed(arguments: list[str], words: str) -> None:
    ran = RUN.invoke(app, ["keys", "create", *arguments, "--manifest"])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert words in ran.stderr


def test_a_key_needs_a_namespace() -> None:
    assert RUN.invoke(app, ["keys", "create", "chat", "--manifest"]).exit_code == 2


def test_the_manifest_has_the_digest_of_the_key_on_standard_error() -> None:
    arguments = ["keys", "create", "chat", "-n", "a", "--keys-namespace", "k", "--manifest"]
    ran = RUN.invoke(app, arguments)
    key = ran.stderr.splitlines()[-1]
    assert is_key(key)
    assert key not in ran.stdout
    (secret,) = yaml.safe_load_all(ran.stdout)
    assert secret["metadata"]["namespace"] == "k"
    assert key_of(secret).digests == (digest_of(key),)
    assert RUN.invoke(app, arguments).stderr.splitlines()[-1] != key


def test_only_one_end_of_a_rotation_can_be_chosen() -> None:
    ran = RUN.invoke(app, ["keys", "rotate", "chat", "--finish", "--grace", "1h"])
    assert ran.exit_code == 2


def test_what_is_written_is_read_again() -> None:
    secret = manifest_of("k", "chat", KEY)
    assert key_of(secret) == KEY
    assert secret["data"] == encoded(KEY)


@pytest.mark.parametrize(
    ("key", "state"),
    [
        (KEY, "in force"),
        (ClientKey("n", ("ab" * 32,), ("a",), expires=NOW), "expired"),
        (ClientKey("n", ("ab" * 32, "cd" * 32), ("a",)), "rotating"),
        (
            ClientKey("n", ("ab" * 32, "cd" * 32), ("a",), old_until=NOW + 1),
            "rotating until 2030-01-01T00:00:01Z",
        ),
        (ClientKey("n", ("ab" * 32, "cd" * 32), ("a",), old_until=NOW), "in force"),
    ],
)
def test_the_table_shows_the_state(key: ClientKey, state: str) -> None:
    head, row = table_of([manifest_of("k", "chat", key)], NOW)
    assert head.split("   ")[0].strip() == COLUMNS[0]
    assert row.endswith(state)
