"""The command that the Helm chart runs before an upgrade: `profiles-in-use`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fleetkeeper.exit_codes import ExitCode, stop

if TYPE_CHECKING:
    from fleetkeeper.api.profiles.profile import ProfileCatalog
    from fleetkeeper_kube.client import KubernetesClient

T = TypeVar("T")


def profiles_in_use(
    profiles: Annotated[
        Path, typer.Option("--profiles", help="YAML file with the new engine profiles.")
    ],
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace", help="Namespace to check. May be repeated. Default: all namespaces."
        ),
    ] = None,
) -> None:
    """Fail if a service uses an engine profile that is not in the file.

    Run it before an upgrade: the operator cannot repair a service whose profile is missing.

    \b
    Examples:
      fleetkeeper profiles-in-use --profiles profiles.yaml
    """  # noqa: D301 - \b keeps the lines of the examples apart
    catalog = _read_catalog(profiles)
    missing = run_with_client(lambda client: _lost(client, catalog, tuple(namespaces or ())))
    for line in missing:
        typer.echo(line, err=True)
    if missing:
        stop(
            ExitCode.FAILED,
            f"{len(missing)} services would lose their engine profile; keep the profile, or change the services first",
        )
    typer.echo("all engine profiles in use are in the file")


async def _lost(
    client: KubernetesClient, catalog: ProfileCatalog, namespaces: tuple[str, ...]
) -> list[str]:
    """Return a line for each service whose profile is missing, none if the CRD is not installed."""
    from fleetkeeper.adapters.kubernetes.resources import INFERENCE_SERVICE  # noqa: PLC0415
    from fleetkeeper_kube.errors import ApiError  # noqa: PLC0415 - heavy

    kept = {profile.name for profile in catalog.profiles}
    found: list[str] = []
    try:
        for namespace in namespaces or (None,):
            async for page in client.list_pages(INFERENCE_SERVICE, namespace):
                found += [line for item in page["items"] if (line := _loss(item, kept))]
    except ApiError as problem:
        if not problem.is_absent:
            raise
    return found


def _loss(service: dict[str, Any], kept: set[str]) -> str:
    profile = ((service.get("status") or {}).get("engine") or {}).get("profile")
    if profile is None or profile in kept:
        return ""
    metadata = service["metadata"]
    return f"{metadata['namespace']}/{metadata['name']} uses the engine profile {profile}"


def _read_catalog(path: Path) -> ProfileCatalog:
    import yaml  # noqa: PLC0415 - heavy
    from pydantic import ValidationError  # noqa: PLC0415

    from fleetkeeper.api.profiles.profile import ProfileCatalog  # noqa: PLC0415

    try:
        return ProfileCatalog.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as problem:
        stop(ExitCode.NO_INPUT, f"cannot read {path}: {problem.strerror}")
    except (yaml.YAMLError, ValidationError) as problem:
        stop(ExitCode.BAD_INPUT, f"{path}: {problem}")


def run_with_client(task: Callable[[KubernetesClient], Awaitable[T]]) -> T:
    """Run the task with a client that uses KUBECONFIG, or otherwise the pod's ServiceAccount."""
    import asyncio  # noqa: PLC0415 - heavy
    import os  # noqa: PLC0415

    from fleetkeeper.adapters.kubernetes.credentials import load_credentials  # noqa: PLC0415
    from fleetkeeper_kube.client import KubernetesClient  # noqa: PLC0415
    from fleetkeeper_kube.credentials import NoCredentials  # noqa: PLC0415
    from fleetkeeper_kube.errors import ApiError  # noqa: PLC0415

    named = os.environ.get("KUBECONFIG")

    async def run() -> T:
        credentials = await load_credentials(Path(named) if named else None)
        async with KubernetesClient(credentials) as client:
            return await task(client)

    try:
        return asyncio.run(run())
    except (ApiError, NoCredentials) as problem:
        stop(ExitCode.FAILED, str(problem))
