"""The commands `fleetkeeper crds` and `version`."""

from __future__ import annotations

import platform
from importlib import metadata

import typer


def crds() -> None:
    """Print the CustomResourceDefinition.

    \b
    Examples:
      fleetkeeper crds | kubectl apply --server-side -f -
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from fleetkeeper.api.schema.crd import crd_text  # noqa: PLC0415 - heavy

    typer.echo(crd_text(), nl=False)


def version() -> None:
    """Print the version, and the supported versions of the engine contract and vLLM."""
    from fleetkeeper.api.options import VLLM_VERSIONS  # noqa: PLC0415 - heavy
    from fleetkeeper.api.profiles.profile import CONTRACTS  # noqa: PLC0415

    typer.echo(
        f"fleetkeeper {metadata.version('fleetkeeper')} (Python {platform.python_version()}, "
        f"engine contract {', '.join(map(str, CONTRACTS))}, vLLM {', '.join(VLLM_VERSIONS)})"
    )
