"""`fleetkeeper render`: every child of a service as YAML, without a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
import yaml

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.types import RolloutStrategy
from fleetkeeper.commands.exit_codes import ExitCode
from fleetkeeper.commands.inputs import NO_UID, Checked, plan_inputs, read_inputs
from fleetkeeper.plan.context import PlanContext
from fleetkeeper.plan.manifests.children import desired_children
from fleetkeeper.plan.model import Manifest

FILES = typer.Option(
    "--file",
    "-f",
    help="A YAML file with InferenceServices; - for standard input. May be repeated.",
)
SETTINGS = typer.Option(
    "--settings",
    help="The operator's settings file, for its engine profiles, images and network peers. Absent: those of a chart with its defaults.",
)
NAMESPACE = typer.Option("--namespace", "-n", help="For services that name no namespace.")


def render(
    file: Annotated[list[str], FILES],
    replicas: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help="Replicas of the engines. Absent: spec.replicas, else minReplicas.",
        ),
    ] = None,
    namespace: Annotated[str, NAMESPACE] = "default",
    settings: Annotated[Path | None, SETTINGS] = None,
) -> None:
    """Print every object that a service would become. No cluster is needed.

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
        child for one in inputs.checked for child in rendered_children(one, context, replicas)
    ]
    typer.echo(yaml_text(children), nl=False)


def rendered_children(
    one: Checked, context: PlanContext, replicas: int | None
) -> tuple[Manifest, ...]:
    """The children of a sound service.

    Without a UID there is no owner to name: the garbage collector removes at once what names an
    owner that does not exist. Fleetkeeper adopts such children by their labels.
    """
    if one.service is None or one.profile is None:
        raise ValueError("only a service without mistakes can be rendered")
    strategy = one.service.spec.rollout.strategy
    children = desired_children(
        one.service,
        one.profile,
        context,
        replicas=first_order(one.service) if replicas is None else replicas,
        strategy=RolloutStrategy.SURGE if strategy is RolloutStrategy.AUTO else strategy,
    )
    if one.service.uid == NO_UID:
        for child in children:
            child["metadata"].pop("ownerReferences", None)
    return children


def first_order(service: InferenceService) -> int:
    """The replicas that a new service starts with."""
    spec = service.spec
    return spec.scaling.min_replicas if spec.replicas is None else spec.replicas


class _Dumper(yaml.SafeDumper):
    """Long texts as blocks, shared values in full."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the base class' signature
        """See the class."""
        return True


# What kubectl's reader takes for something else than a text, and ours would leave without quotes.
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
    """The objects as one YAML stream."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)
