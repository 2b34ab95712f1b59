"""`fleetkeeper signing-keys`: the keys with which the operator and the gateway sign.

The chart runs `create` before each installation and upgrade. Keys of clients are another command,
`fleetkeeper keys`.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetkeeper.commands.install import run_with_client
from fleetkeeper.exit_codes import ExitCode, stop

if TYPE_CHECKING:
    from fleetkeeper_kube.client import KubernetesClient

app = typer.Typer(
    name="signing-keys",
    help="Create and rotate the keys with which the operator and the gateway sign.",
    no_args_is_help=True,
)

MIN_AFTER_S = 300.0
"""A new public key needs up to two minutes to reach the operator, and two more to reach the engines."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_PUBLIC_FILES = frozenset({"jwks.json", "signFrom"})


@app.command()
def create(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory", help="Directory to write control keys to: key.pem and jwks.json."
        ),
    ] = None,
    secret: Annotated[
        str,
        typer.Option(
            "--secret", help="Name of the Secret with control keys to create if it does not exist."
        ),
    ] = "",
    grant_directory: Annotated[
        Path | None,
        typer.Option(
            "--grant-directory",
            help="Directory to write grant keys to: signing.pem and jwks.json.",
        ),
    ] = None,
    grant_secret: Annotated[
        str,
        typer.Option(
            "--grant-secret",
            help="Name of the Secret with grant keys to create if it does not exist.",
        ),
    ] = "",
    namespace: Annotated[
        str, typer.Option("--namespace", help="Namespace of the Secrets.")
    ] = "default",
) -> None:
    """Create control keys of the operator, grant keys of the gateway, or both. Existing keys are never overwritten.

    \b
    Examples:
      fleetkeeper signing-keys create --directory ./control-keys --grant-directory ./grant-keys
      fleetkeeper signing-keys create --secret fleetkeeper-control-keys --namespace fleetkeeper-system
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from fleetkeeper.adapters.keys import new_control_keys, new_grant_keys  # noqa: PLC0415 - heavy

    if not (directory or secret or grant_directory or grant_secret):
        stop(
            ExitCode.USAGE,
            "set at least one of --directory, --secret, --grant-directory and --grant-secret",
        )
    if directory is not None:
        _write(directory, new_control_keys().files())
    if grant_directory is not None:
        _write(grant_directory, new_grant_keys())
    wanted = {
        name: files
        for name, files in ((secret, new_control_keys().files()), (grant_secret, new_grant_keys()))
        if name
    }
    for name, files in wanted.items():
        created = partial(_create, namespace=namespace, name=name, files=files)
        typer.echo(run_with_client(created))


@app.command()
def rotate(
    grant_secret: Annotated[
        str, typer.Option("--grant-secret", help="Name of the Secret with the grant keys.")
    ],
    namespace: Annotated[
        str, typer.Option("--namespace", help="Namespace of the Secret.")
    ] = "default",
    after: Annotated[
        str,
        typer.Option(
            "--after",
            help="Time until the gateway signs with the new key, for example 900s, 15m or 1h. Every engine must trust the key by then.",
        ),
    ] = "15m",
) -> None:
    """Give the gateway a new grant key, without a restart and without a refused request.

    Engines trust the new key first. Then the gateway signs with it. The next rotation removes the old key.

    \b
    Examples:
      fleetkeeper signing-keys rotate --grant-secret fleetkeeper-grant-keys --namespace fleetkeeper-system
    """  # noqa: D301 - \b keeps the lines of the examples apart
    after_s = _seconds(after)
    if after_s < MIN_AFTER_S:
        typer.echo(
            f"warning: within {after} not every engine may trust the new key; "
            "such an engine refuses requests until it does",
            err=True,
        )
    typer.echo(run_with_client(lambda client: _rotate(client, namespace, grant_secret, after_s)))


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([smh])", text)
    if found is None:
        stop(ExitCode.USAGE, f"--after is {text!r}; use a number with s, m or h, such as 15m")
    return int(found[1]) * _UNITS[found[2]]


def _write(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    taken = sorted(name for name in files if (directory / name).exists())
    if taken:
        stop(ExitCode.FAILED, f"{directory} already contains {', '.join(taken)}; nothing written")
    for name, text in files.items():
        path = directory / name
        path.touch(mode=0o644 if name in _PUBLIC_FILES else 0o600, exist_ok=False)
        path.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {', '.join(sorted(files))} to {directory}")


async def _create(
    client: KubernetesClient, *, namespace: str, name: str, files: Mapping[str, str]
) -> str:
    """Create the Secret without reading it, so the caller needs only the permission to create."""
    from fleetkeeper_kube.errors import ApiError  # noqa: PLC0415 - heavy

    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/name": "fleetkeeper"},
        },
        "type": "Opaque",
        "stringData": dict(files),
    }
    try:
        await client.request("POST", f"/api/v1/namespaces/{namespace}/secrets", body=body)
    except ApiError as problem:
        if problem.reason == "AlreadyExists":
            return f"Secret {namespace}/{name} already exists; unchanged"
        raise
    return f"created Secret {namespace}/{name}"


async def _rotate(client: KubernetesClient, namespace: str, name: str, after_s: float) -> str:
    from fleetkeeper.adapters.keys import rotated_grant_keys  # noqa: PLC0415 - heavy

    path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
    live = await client.request("GET", path)
    now = time.time()
    try:
        data = live.get("data") or {}
        before = {key: base64.b64decode(text).decode() for key, text in data.items()}
        files = rotated_grant_keys(before, sign_from=now + after_s, now=now)
    except ValueError as problem:
        stop(
            ExitCode.FAILED, f"cannot rotate the grant keys of Secret {namespace}/{name}: {problem}"
        )
    # The version makes the API server refuse this if somebody changed the Secret in between.
    changed = {key: base64.b64encode(text.encode()).decode() for key, text in files.items()}
    await client.request("PUT", path, body={**live, "data": {**data, **changed}})
    return f"Secret {namespace}/{name}: the gateway signs with the new key from {files['signFrom']}"
