"""`fleetkeeper wake NAME`: wake a service that sleeps, without a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from fleetkeeper.api import names
from fleetkeeper.common.sleep import parse_sleep
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.fleet.source import TIMEOUT_S, in_a_line, load_api

FIELD_MANAGER: Final = "fleetkeeper-wake"


def wake(
    name: Annotated[str, typer.Argument(help="Name of the InferenceService.")],
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Namespace of the InferenceService.")
    ] = "default",
) -> None:
    """Wake a service that sleeps, without a request.

    Writes the annotation fleetkeeper.io/wake with the rights of your kubeconfig. After a failed start,
    the next one begins without a pause.

    \b
    Examples:
      fleetkeeper wake chat -n team-a
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from kubernetes import client  # noqa: PLC0415 - takes 0.5 s; only these commands need it
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    api = load_api()
    objects = client.CustomObjectsApi(api)
    service, place = f"{namespace}/{name}", (names.GROUP, names.VERSION, namespace, names.PLURAL)
    try:
        found = objects.get_namespaced_custom_object(*place, name, _request_timeout=TIMEOUT_S)
        sleep = parse_sleep(found.get("status") or {})
        _refuse_in_vain(service, found["spec"], is_awake=sleep.state is None or sleep.is_swapping)
        if sleep.is_waking:
            typer.echo(f"{service} wakes already; nothing changed")
            return
        mark = {"metadata": {"annotations": {names.ANNOTATION_WAKE: str(sleep.number)}}}
        objects.patch_namespaced_custom_object(
            *place, name, mark, field_manager=FIELD_MANAGER, _request_timeout=TIMEOUT_S
        )
    except (client.ApiException, HTTPError, OSError) as problem:
        stop(
            ExitCode.FAILED,
            f"cannot wake {service} at {api.configuration.host}: {in_a_line(problem)}; "
            "check the name, the kubeconfig (KUBECONFIG) and your rights",
        )
    typer.echo(f"{service} {'wakes' if sleep.is_asleep else 'stays awake'}")


def _refuse_in_vain(service: str, spec: Mapping[str, Any], *, is_awake: bool) -> None:
    """Stop the command if the operator would not wake the service."""
    if is_awake:
        stop(ExitCode.FAILED, f"{service} is awake; nothing changed")
    mode = (spec.get("scaling") or {}).get("mode", "Auto")
    for field, holds in (
        ("spec.paused is true", spec.get("paused")),
        ("spec.suspend is true", spec.get("suspend")),
        ("spec.replicas is 0", spec.get("replicas") == 0),
        (f"spec.scaling.mode is {mode}", mode != "Auto"),
    ):
        if holds:
            stop(ExitCode.FAILED, f"{service} does not wake while {field}; nothing changed")
