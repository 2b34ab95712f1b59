"""Commands of `fleetkeeper local` that build, load and push images."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from typing import Annotated

import typer

from fleetkeeper_local import existing_cluster
from fleetkeeper_local.common.command_line import Dir, failure, orderly
from fleetkeeper_local.common.report import say
from fleetkeeper_local.control_plane.processes import Processes
from fleetkeeper_local.images import builder
from fleetkeeper_local.images.builder import BUILDERS, PUBLISHED
from fleetkeeper_local.node import flags
from fleetkeeper_local.node.node import Node


def load_image(
    source: Annotated[
        str,
        typer.Argument(
            help="A tar archive, an OCI layout directory, or containers-storage:NAME (buildah)."
        ),
    ],
    name: Annotated[str, typer.Argument(help="NAME or NAME:TAG in the cluster's registry.")],
    directory: Dir,
) -> None:
    """Push an image to the node's registry, and print the name by which pods pull it."""
    if orderly(lambda: existing_cluster.remembered(directory)):
        raise failure(
            "an existing cluster pulls images from your registry: `make images push REGISTRY=...`"
        )
    repository, _, tag = name.partition(":")
    typer.echo(
        orderly(
            lambda: Node(flags.read_settings(directory)).load_image(
                source, repository, tag or "latest"
            )
        )
    )


def build_images(
    directory: Dir,
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(sorted(BUILDERS))}. Default: all."),
    ] = None,
) -> None:
    """Build images. If the node's registry runs, push them to it and print their names."""
    settings = flags.read_settings(directory)
    serves = Processes(directory, tied=False).running("registry") is not None
    for name in names or sorted(BUILDERS):
        image = orderly(lambda name=name: builder.build(name))  # type: ignore[misc]
        if serves:
            typer.echo(orderly(lambda image=image: image.push(settings.registry_port)))  # type: ignore[misc]
        else:
            say(f"built {name}; to push it, run `fleetkeeper local up`, then this command again")


def push(
    registry: Annotated[
        str, typer.Argument(help="Registry and path: registry.example.com/fleetkeeper")
    ],
    *,
    tag: Annotated[str, typer.Option(help="Tag of the images.")] = metadata.version("fleetkeeper"),
    plain_http: Annotated[
        bool, typer.Option(help="Use plain HTTP: the registry has no TLS.")
    ] = False,
) -> None:
    """Build the images that the chart names and push them to a registry (first: skopeo login)."""
    for name in sorted(PUBLISHED):
        typer.echo(orderly(partial(_publish, name, registry, tag, plain_http=plain_http)))


def _publish(name: str, registry: str, tag: str, *, plain_http: bool) -> str:
    return builder.build(name).publish(registry, tag, plain_http=plain_http)
