"""`fleetkeeper keys`: create, list, rotate and revoke the keys of the gateway's clients."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer

from fleetkeeper.commands.keys.client_key_secrets import (
    KeySecrets,
    Secret,
    key_of,
    manifest_of,
)
from fleetkeeper.commands.service.render import yaml_text
from fleetkeeper.exit_codes import EPILOG, ExitCode, stop
from fleetkeeper_contract import client_keys as entry
from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.client_key_entries import (
    BadEntry,
    ClientKey,
    digest_of,
    format_limit,
    new_key,
    parse_entries,
    parse_time,
)

SECONDS: Final = {"h": 3600, "d": 86_400}
NAME: Final = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
COLUMNS: Final = (
    "KEY",
    "NAME",
    "NAMESPACES",
    "MODELS",
    "HIGHEST TIER",
    "LIMITS",
    "EXPIRES",
    "STATE",
)

app = typer.Typer(
    name="keys",
    help="Manage the keys of the gateway's clients. Each is a Secret that holds a digest of the key, never the key.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

KeyName = Annotated[str, typer.Argument(help="ID of the key: the name of its Secret.")]
KeysNamespace = Annotated[
    str, typer.Option("--keys-namespace", help="Namespace of the Secrets of client keys.")
]
AsManifest = Annotated[
    bool,
    typer.Option(
        "--manifest",
        help="Print the Secret as YAML and the key to standard error, and write nothing to the cluster.",
    ),
]
DEFAULT_NAMESPACE: Final = "fleetkeeper-keys"


@app.command()
def create(
    name: KeyName,
    *,
    namespaces: Annotated[
        list[str],
        typer.Option(
            "--namespace", "-n", help="Namespace whose services the key may use. May be repeated."
        ),
    ],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Glob of model names. May be repeated. Default: all models."),
    ] = None,
    highest_tier: Annotated[
        str, typer.Option("--highest-tier", help="Highest tier: realtime, standard or batch.")
    ] = "standard",
    expires: Annotated[
        str, typer.Option("--expires", help="End of the key: 90d, 12h, or an RFC 3339 time.")
    ] = "",
    requests_per_minute: Annotated[
        str, typer.Option(help="Limit for each tier: 100, or realtime=20,standard=100.")
    ] = "",
    tokens_per_minute: Annotated[
        str, typer.Option(help="Limit of tokens a minute, in the same form.")
    ] = "",
    concurrency: Annotated[
        str, typer.Option(help="Limit of requests in progress, in the same form.")
    ] = "",
    title: Annotated[str, typer.Option("--title", help="Display name (default: the ID).")] = "",
    keys_namespace: KeysNamespace = DEFAULT_NAMESPACE,
    manifest: AsManifest = False,
) -> None:
    """Create a key and print it once.

    \b
    Examples:
      fleetkeeper keys create chat-app -n team-a
      fleetkeeper keys create nightly -n team-a -n team-b --highest-tier batch --expires 90d
      fleetkeeper keys create chat-app -n team-a --requests-per-minute 100 --manifest > key.yaml
    """  # noqa: D301 - \b keeps the lines of the examples apart
    if not NAME.fullmatch(name) or name == entry.ANONYMOUS:
        stop(
            ExitCode.USAGE,
            f"{name!r} is no name of a key; use lower-case letters, digits and -, and not {entry.ANONYMOUS}",
        )
    secret = new_key(secrets.token_bytes(entry.KEY_BYTES))
    given = {
        entry.DIGEST: digest_of(secret),
        entry.NAME: title,
        entry.NAMESPACES: ",".join(namespaces),
        entry.MODELS: ",".join(models or ()),
        entry.HIGHEST_TIER: highest_tier,
        entry.EXPIRES: _end(expires) if expires else "",
        entry.REQUESTS_PER_MINUTE: requests_per_minute,
        entry.TOKENS_PER_MINUTE: tokens_per_minute,
        entry.CONCURRENCY: concurrency,
    }
    try:
        key = parse_entries(
            {name: value for name, value in given.items() if value}, default_name=name
        )
    except BadEntry as problem:
        stop(ExitCode.USAGE, str(problem))
    if manifest:
        _print_manifest(keys_namespace, name, key, secret)
        return
    KeySecrets(keys_namespace).create(name, key)
    _say(f"created the key {name} in namespace {keys_namespace}; it is shown only now:")
    typer.echo(secret)


@app.command("list")
def list_keys(keys_namespace: KeysNamespace = DEFAULT_NAMESPACE) -> None:
    """List the keys with their rights, limits and state. No secret is shown.

    \b
    Examples:
      fleetkeeper keys list
    """  # noqa: D301 - \b keeps the lines of the examples apart
    found = KeySecrets(keys_namespace).list()
    if not found:
        _say(f"no keys in namespace {keys_namespace}; create one with: fleetkeeper keys create")
        return
    for line in table_of(found, time.time()):
        typer.echo(line)


@app.command()
def rotate(
    name: KeyName,
    *,
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            help="Time after which the old key is refused: 24h, 7d. Default: at --finish.",
        ),
    ] = "",
    finish: Annotated[
        bool, typer.Option("--finish", help="End a rotation: refuse the old key from now on.")
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Undo a rotation: refuse the new key from now on.")
    ] = False,
    keys_namespace: KeysNamespace = DEFAULT_NAMESPACE,
    manifest: AsManifest = False,
) -> None:
    """Give a key a new secret and print it once. The old one is accepted too until the rotation ends.

    \b
    Examples:
      fleetkeeper keys rotate chat-app --grace 24h
      fleetkeeper keys rotate chat-app --finish
    """  # noqa: D301 - \b keeps the lines of the examples apart
    if finish + cancel + bool(grace) > 1:
        stop(ExitCode.USAGE, "set at most one of --grace, --finish and --cancel")
    store = KeySecrets(keys_namespace)
    written, key = store.read_key(name)
    secret = ""
    if finish or cancel:
        key = _ended(name, key, keep=-1 if finish else 0)
    else:
        secret = new_key(secrets.token_bytes(entry.KEY_BYTES))
        key = _begun(name, key, secret, grace)
    if manifest:
        _print_manifest(keys_namespace, name, key, secret)
        return
    store.replace(written, key)
    if not secret:
        _say(f"the rotation of the key {name} has ended; one secret is accepted")
        return
    until = f"until {rfc3339.format(key.old_until)}" if key.old_until else "until you run --finish"
    _say(f"the old secret of the key {name} is accepted {until}; the new one is shown only now:")
    typer.echo(secret)


@app.command()
def revoke(name: KeyName, keys_namespace: KeysNamespace = DEFAULT_NAMESPACE) -> None:
    """Delete a key. Requests in progress with it end too, within 2 seconds.

    \b
    Examples:
      fleetkeeper keys revoke chat-app
    """  # noqa: D301 - \b keeps the lines of the examples apart
    store = KeySecrets(keys_namespace)
    store.delete(store.read(name))
    _say(f"revoked the key {name} of namespace {keys_namespace}")


def table_of(found: Sequence[Secret], now: float) -> list[str]:
    """Return the lines of a table of keys."""
    owners = Counter(digest for secret in found for digest in _digests(secret))
    rows = [COLUMNS, *(_row(secret, owners, now) for secret in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _digests(secret: Secret) -> tuple[str, ...]:
    try:
        return key_of(secret).digests
    except BadEntry:
        return ()  # its row says why


def _row(secret: Secret, owners: Counter[str], now: float) -> tuple[str, ...]:
    name = str(secret["metadata"]["name"])
    try:
        key = key_of(secret)
    except BadEntry as problem:
        return (name, *["-"] * 6, f"refused: {problem}")
    limits = {
        "requests/min": key.requests_per_minute,
        "tokens/min": key.tokens_per_minute,
        "concurrency": key.concurrency,
    }
    return (
        name,
        key.name,
        ",".join(key.namespaces),
        ",".join(key.models),
        key.highest_tier,
        " ".join(f"{what}:{format_limit(limit)}" for what, limit in limits.items() if limit) or "-",
        rfc3339.format(key.expires) if key.expires is not None else "-",
        _state(key, owners, now),
    )


def _state(key: ClientKey, owners: Counter[str], now: float) -> str:
    if any(owners[digest] > 1 for digest in key.digests):
        return "refused: another Secret has the same digest"
    if key.expires is not None and now >= key.expires:
        return "expired"
    if len(key.digests) == 1 or (key.old_until is not None and now >= key.old_until):
        return "in force"
    return f"rotating until {rfc3339.format(key.old_until)}" if key.old_until else "rotating"


def _begun(name: str, key: ClientKey, secret: str, grace: str) -> ClientKey:
    """Return the key with a new digest beside the one in force."""
    is_over = key.old_until is not None and time.time() >= key.old_until
    if len(key.digests) == 2 and not is_over:
        stop(
            ExitCode.FAILED,
            f"the key {name} is being rotated; end that with: fleetkeeper keys rotate {name} --finish "
            "(or --cancel, if the new secret is lost)",
        )
    until = parse_time(entry.OLD_UNTIL, _end(grace)) if grace else None
    return replace(key, digests=(key.digests[-1], digest_of(secret)), old_until=until)


def _ended(name: str, key: ClientKey, keep: int) -> ClientKey:
    """Return the key with one of its two digests."""
    if len(key.digests) != 2:
        stop(ExitCode.FAILED, f"the key {name} is not being rotated; nothing changed")
    return replace(key, digests=(key.digests[keep],), old_until=None)


def _end(text: str) -> str:
    """Return the RFC 3339 time of a duration from now, or the text if it is none."""
    match = re.fullmatch("([1-9][0-9]{0,4})([hd])", text)
    if match:
        return rfc3339.format(time.time() + int(match[1]) * SECONDS[match[2]])
    try:
        moment = parse_time("the end", text)
    except BadEntry as problem:
        stop(ExitCode.USAGE, f"{problem}, or a duration such as 12h or 90d")
    if moment <= time.time():
        stop(ExitCode.USAGE, f"{text} is in the past; choose a later time")
    return text


def _print_manifest(namespace: str, name: str, key: ClientKey, secret: str) -> None:
    typer.echo(yaml_text([manifest_of(namespace, name, key)]), nl=False)
    if secret:
        _say("the key is shown only now:")
        _say(secret)


def _say(text: str) -> None:
    typer.echo(text, err=True)
