"""`fleetkeeper mirror`: copy the images and the chart of a release to another registry."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fleetkeeper.exit_codes import ExitCode, stop

if TYPE_CHECKING:
    from fleetkeeper.adapters.registry.copying import Content, Copier
    from fleetkeeper.adapters.registry.names import Place, Reference

PROGRESS_PERIOD_S: Final = 5.0
MIB: Final = 1024**2
CHART_LAYER: Final = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
IMAGE_FIELDS: Final = ("image", "injectedImage")
"""The fields of an engine profile that name images."""
SECTIONS: Final = ("router", "gateway")
"""The sections of the values that name the image of a component. Earlier charts have no gateway."""


def mirror(
    to: Annotated[
        str, typer.Option("--to", help="Registry and path: mirror.example.com/fleetkeeper.")
    ],
    source: Annotated[
        Path,
        typer.Option("--from", help="Directory of a release's files, or its images.txt."),
    ] = Path(),
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="The target has no TLS. Loopback never has.")
    ] = False,
    via: Annotated[
        str | None,
        typer.Option(
            "--via",
            help="Registry and path of an earlier mirror to read, in place of the release's.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read both registries, and copy nothing.")
    ] = False,
) -> None:
    """Copy the images and the chart of a release to another registry, and print values for Helm.

    Reads images.txt and chart.txt. Names keep their path, digests stay the same, and what refers to an
    image (signatures, SBOM) is copied with it. Run it again after a failure: only missing blobs are
    transferred. Uses the logins of docker, skopeo and Helm. Values go to standard output.

    \b
    Examples:
      fleetkeeper mirror --from dist --to mirror.example.com/fleetkeeper > mirror-values.yaml
      fleetkeeper mirror --from dist --to mirror.example.com/fleetkeeper --dry-run
      fleetkeeper mirror --from dist --via localhost:5000 --to mirror.example.com/fleetkeeper
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from fleetkeeper.adapters.registry.client import RegistryError  # noqa: PLC0415 - heavy

    images, chart = _read_names(source)
    place, read = _place("--to", to), _place("--via", via) if via else None
    task = _mirror(images, chart, place, read, plain_http=plain_http, dry_run=dry_run)
    try:
        values = asyncio.run(task)
    except RegistryError as problem:
        stop(ExitCode.FAILED, str(problem))
    if dry_run:
        return
    if chart is None:
        _say(f"no chart.txt beside {source}, so there are no values to print")
        return
    import yaml  # noqa: PLC0415 - heavy

    typer.echo(yaml.safe_dump(values, sort_keys=False), nl=False)
    copied = chart.at(place)
    _say(
        "install with these values:\n"
        f"  helm install fleetkeeper oci://{copied.name} --version {copied.tag} "
        "--namespace fleetkeeper-system --create-namespace --values FILE"
    )


def _place(option: str, text: str) -> Place:
    from fleetkeeper.adapters.registry.names import Place  # noqa: PLC0415 - heavy

    try:
        return Place.parse(text)
    except ValueError as problem:
        stop(ExitCode.USAGE, f"{option}: {problem}")


def _read_names(source: Path) -> tuple[list[Reference], Reference | None]:
    """Return the images and the chart (None: there is no chart.txt) of a release's files."""
    listed = source / "images.txt" if source.is_dir() else source
    images = _read_references(listed)
    if not images:
        stop(ExitCode.BAD_INPUT, f"{listed} names no image; use the images.txt of a release")
    chart = listed.with_name("chart.txt")
    if not chart.exists():
        return images, None
    charts = _read_references(chart)
    if len(charts) != 1 or not charts[0].tag:
        stop(ExitCode.BAD_INPUT, f"{chart} is not one line oci://HOST/NAME:VERSION@sha256:DIGEST")
    return images, charts[0]


def _read_references(path: Path) -> list[Reference]:
    from fleetkeeper.adapters.registry.names import Reference  # noqa: PLC0415 - heavy

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not text"
        stop(
            ExitCode.NO_INPUT,
            f"cannot read {path}: {reason}; set --from to the directory of a release's files",
        )
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(Reference.parse(line.strip().removeprefix("oci://")))
        except ValueError as problem:
            stop(ExitCode.BAD_INPUT, f"{path}:{number}: {problem}; use the file of a release")
    return found


async def _mirror(
    images: list[Reference],
    chart: Reference | None,
    place: Place,
    via: Place | None,
    *,
    plain_http: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """Copy everything, the chart last; return the values for Helm."""
    from fleetkeeper.adapters.registry.copying import Copier  # noqa: PLC0415 - heavy

    values: dict[str, Any] = {}
    everything = [*images, *([chart] if chart else [])]
    async with Copier(frozenset({place.host} if plain_http else ())) as copier:
        for number, released in enumerate(everything, 1):
            source = released.at(via) if via else released
            _say(f"[{number}/{len(everything)}] {source}")
            content = await copier.read(source)
            if released is chart:
                values = _renamed(await _chart_values(copier, source, content), images, place)
            # Registries may remove what has no tag. A tag by digest never moves.
            target = released.at(place)
            target = replace(target, tag=target.tag or f"mirrored-{target.digest[7:23]}")
            if dry_run:
                missing = await copier.missing(target, content)
                _say(
                    f"  to {target.name}: {len(missing)} of {len(content.blobs)} blobs are missing, "
                    f"{_mib(sum(missing.values()))} of {_mib(content.size_bytes)}"
                )
                continue
            await _copy(copier, source, target, content)
    return values


async def _copy(copier: Copier, source: Reference, target: Reference, content: Content) -> None:
    from fleetkeeper.adapters.registry.copying import Progress  # noqa: PLC0415 - heavy

    shown = time.monotonic()

    def show() -> None:
        nonlocal shown
        if time.monotonic() - shown >= PROGRESS_PERIOD_S:
            shown = time.monotonic()
            done = progress.copied_bytes + progress.present_bytes
            _say(f"  {_mib(done)} of {_mib(content.size_bytes)}")

    progress = Progress(show)
    await copier.copy(source, target, content, progress)
    _say(
        f"  {target.name}: {_mib(progress.copied_bytes)} copied, {_mib(progress.present_bytes)} "
        f"present, attached artifacts: {len(content.referrers)}, digest verified"
    )


async def _chart_values(copier: Copier, chart: Reference, content: Content) -> dict[str, Any]:
    """Return the values of the chart in the registry."""
    import yaml  # noqa: PLC0415 - heavy

    (manifest,) = (found for found in content.manifests if found.digest == chart.digest)
    layers = {layer["mediaType"]: layer["digest"] for layer in manifest.document["layers"]}
    if CHART_LAYER not in layers:
        stop(ExitCode.BAD_INPUT, f"{chart} is not a Helm chart; use the chart.txt of a release")
    archive = io.BytesIO(await copier.read_blob(chart, layers[CHART_LAYER]))
    try:
        with tarfile.open(fileobj=archive, mode="r:gz") as files:
            member = files.extractfile(f"{chart.repository.rpartition('/')[2]}/values.yaml")
            values: dict[str, Any] = yaml.safe_load(member.read() if member else b"") or {}
    except (KeyError, tarfile.TarError, yaml.YAMLError) as problem:
        stop(ExitCode.BAD_INPUT, f"cannot read the values of {chart}: {problem}")
    if not {"image", "router", "engineProfiles"} <= values.keys():
        stop(
            ExitCode.BAD_INPUT,
            f"{chart} is not the chart of Fleetkeeper; use the chart.txt of a release",
        )
    return values


def _renamed(values: dict[str, Any], images: list[Reference], place: Place) -> dict[str, Any]:
    """Return the values that name images, with the names in the other registry.

    Stops if the chart names an image that is not in the list: it would not have been copied.
    """
    known = {f"{image.name}@{image.digest}": image for image in images}

    def new(name: str) -> Reference:
        if name not in known:
            stop(
                ExitCode.BAD_INPUT,
                f"the chart names {name}, which is not in images.txt; use the files of one release",
            )
        return known[name].at(place)

    operator = values["image"]
    profiles = {
        name: {field: str(new(profile[field])) for field in IMAGE_FIELDS if field in profile}
        for name, profile in values["engineProfiles"].items()
    }
    return {
        "image": {"repository": new(f"{operator['repository']}@{operator['digest']}").name},
        **{name: {"image": str(new(values[name]["image"]))} for name in SECTIONS if name in values},
        "engineProfiles": profiles,
    }


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def _say(text: str) -> None:
    typer.echo(text, err=True)
