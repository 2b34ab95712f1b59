"""`fleetkeeper render`: print all child objects of a service as YAML, without a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
import yaml

from fleetkeeper.api.types import RolloutStrategy
from fleetkeeper.commands.service.inputs import NO_UID, Checked, plan_inputs, read_inputs
from fleetkeeper.common.activation import activation_of
from fleetkeeper.common.values import Manifest
from fleetkeeper.exit_codes import ExitCode
from fleetkeeper.reconcile.context import PlanContext
from fleetkeeper.reconcile.manifests.children import desired_children

FILES = typer.Option(
    "--file",
    "-f",
    help="YAML file with InferenceServices, or - for standard input. May be repeated.",
)
SETTINGS = typer.Option(
    "--settings",
    help="Settings file of the operator, for engine profiles, images, and network peers. Default: the defaults of the Helm chart.",
)
NAMESPACE = typer.Option(
    "--namespace", "-n", help="Namespace of services that do not set metadata.namespace."
)


def render(
    file: Annotated[list[str], FILES],
    replicas: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help="Number of replicas. Default: 0 with spec.suspend, otherwise spec.replicas, otherwise scaling.minReplicas.",
        ),
    ] = None,
    namespace: Annotated[str, NAMESPACE] = "default",
    settings: Annotated[Path | None, SETTINGS] = None,
) -> None:
    """Print the child objects of InferenceServices as YAML. Requires no cluster.

    \b
    Examples:
      fleetkeeper render -f chat.yaml
      fleetkeeper render -f chat.yaml --replicas 4 | kubectl apply --dry-run=server -f -
      kubectl get fis chat -o yaml | fleetkeeper render -f -
    """  # noqa: D301 - \b keeps the lines of the examples apart
    context = plan_inputs(settings)
    inputs = read_inputs(file, context, namespace)
    if inputs.complaints:
        for complaint in inputs.complaints:
            typer.echo(complaint, err=True)
        raise typer.Exit(ExitCode.BAD_INPUT.value)
    children = [
        child
        for checked in inputs.checked
        for child in rendered_children(checked, context, replicas)
    ]
    typer.echo(yaml_text(children), nl=False)


def rendered_children(
    one: Checked, context: PlanContext, replicas: int | None
) -> tuple[Manifest, ...]:
    """Return the child objects of a valid service.

    Children of a service without a UID have no owner reference, because the garbage collector deletes
    objects whose owner does not exist. Fleetkeeper adopts such children by their labels.
    """
    if one.service is None or one.profile is None:
        raise ValueError("only valid services can be rendered")
    spec = one.service.spec
    strategy = spec.rollout.strategy
    initial = activation_of(spec).floor(spec.scaling.min_replicas)
    children = desired_children(
        one.service,
        one.profile,
        context,
        replicas=initial if replicas is None else replicas,
        strategy=RolloutStrategy.SURGE if strategy is RolloutStrategy.AUTO else strategy,
    )
    if one.service.uid == NO_UID:
        for child in children:
            child["metadata"].pop("ownerReferences", None)
    return children


class _Dumper(yaml.SafeDumper):
    """A dumper that repeats shared values instead of writing anchors."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the base class' signature
        """Return True: write no anchors."""
        return True


# Quote strings that kubectl's YAML parser would read as booleans or numbers.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^[yYnN]$", re.ASCII), list("yYnN")
)
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(0[xXbBoO][0-9a-fA-F_]+|(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9_]+)?)$",
        re.ASCII,
    ),
    list("-+.0123456789"),
)


def yaml_text(manifests: list[Manifest]) -> str:
    """Return the objects as a YAML stream."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)
