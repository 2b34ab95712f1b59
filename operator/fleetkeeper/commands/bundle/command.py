"""`fleetkeeper support-bundle`: write what a report of a problem needs to one file."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from fleetkeeper.commands.bundle.archive import Archive
from fleetkeeper.commands.bundle.contents import Collector
from fleetkeeper.commands.bundle.reader import Reader
from fleetkeeper.commands.fleet.top import OperatorNamespace
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.fleet.source import load_api

SHOWN_REASONS = 5


def support_bundle(
    out: Annotated[Path, typer.Option("--output", "-o", help="File to write, such as b.tar.gz.")],
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the InferenceService. Default: all of the namespace."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace of the InferenceServices. Default: all namespaces, or default with a name.",
        ),
    ] = None,
    operator_namespace: OperatorNamespace = "fleetkeeper-system",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write objects, events, decisions, logs, metrics and versions to a file for a report of a problem.

    Reads with the rights of your kubeconfig, and changes nothing. Secrets are never read. Credentials
    in the other parts are redacted. What you may not read is listed in index.json.

    \b
    Examples:
      fleetkeeper support-bundle chat -n team-a -o chat.tar.gz
      fleetkeeper support-bundle -o fleet.tar.gz
    """  # noqa: D301 - \b keeps the lines of the examples apart
    if not force and os.path.lexists(out):
        stop(ExitCode.FAILED, f"{out} exists; choose another file, or set --force")
    if not os.access(out.parent, os.W_OK):
        stop(ExitCode.FAILED, f"cannot write to the directory {out.parent}; choose another file")
    archive, reader = Archive(), Reader(load_api())
    Collector(
        reader, archive, operator_namespace, lambda part: typer.echo(f"reading {part}", err=True)
    ).collect(namespace, name)
    if not archive.count:
        reason = archive.missing[0]["reason"] if archive.missing else "no response"
        stop(
            ExitCode.FAILED,
            f"could not read anything from {reader.host}: {reason}; nothing written; "
            "check the kubeconfig (KUBECONFIG) and your rights",
        )
    about = {
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "fleetkeeper": metadata.version("fleetkeeper"),
        "python": platform.python_version(),
        "scope": {"namespace": namespace, "name": name, "operatorNamespace": operator_namespace},
    }
    try:
        archive.write(out, about, force=force)
    except FileExistsError:
        stop(ExitCode.FAILED, f"{out} exists; choose another file, or set --force")
    except OSError as problem:
        stop(ExitCode.FAILED, f"cannot write {out}: {problem.strerror}")
    _warn(archive)
    typer.echo(f"wrote {out} ({archive.count} files). Read it before you send it.")


def _warn(archive: Archive) -> None:
    if archive.missing:
        typer.echo(
            f"warning: {len(archive.missing)} parts could not be read (index.json lists all):",
            err=True,
        )
        for row in archive.missing[:SHOWN_REASONS]:
            typer.echo(f"  {row['what']}: {row['reason']}", err=True)
    if archive.cut:
        typer.echo(f"warning: {len(archive.cut)} parts were cut (index.json lists all)", err=True)
