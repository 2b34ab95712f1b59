"""`python -m fleetkeeper_local.release`: what `make release` runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fleetkeeper_local.common.command_line import failure, orderly
from fleetkeeper_local.common.paths import REPOSITORY
from fleetkeeper_local.release.publish import Release, publish
from fleetkeeper_local.release.sign import Signer


def main(
    version: Annotated[str, typer.Argument(help="X.Y.Z, the chart's version.")],
    registry: Annotated[
        str, typer.Argument(help="Registry and path: registry.example.com/fleetkeeper")
    ],
    *,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=OTHER",
            help="Take an image that is not from this repository from another registry, or by digest.",
        ),
    ] = None,
    sign_key: Annotated[
        str,
        typer.Option(
            help="Sign with this private key: a file of cosign, with COSIGN_PASSWORD, or a URI of a key service."
        ),
    ] = "",
    sign_keyless: Annotated[
        bool, typer.Option("--sign-keyless", help="Sign with the identity of this CI job.")
    ] = False,
) -> None:
    """Publish a release, and write its files to dist/ (first: skopeo login, helm registry login).

    A registry on loopback is used over plain HTTP.
    """
    if sign_key and sign_keyless:
        raise failure("set one of --sign-key and --sign-keyless")
    signer = Signer(sign_key) if sign_key or sign_keyless else None
    names = dict[str, str]()
    for mapping in upstream or ():
        name, equals, other = mapping.partition("=")
        if not (name and equals and other):
            raise failure(f"--upstream {mapping}: write NAME=OTHER")
        names[name] = other
    release = Release(REPOSITORY, version, registry.rstrip("/"), names, signer)
    for image in orderly(lambda: publish(release)):
        typer.echo(image)


if __name__ == "__main__":
    typer.run(main)
