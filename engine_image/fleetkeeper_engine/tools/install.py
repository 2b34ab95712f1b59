"""`fleetkeeper-engine install DIR`: a copy of our packages where a stock vLLM container can run it.

    DIR/own/            our packages and their entry points, first on the path
    DIR/dependencies/   its requirements, last on the path: what the vLLM image has wins
    DIR/bin/fleetkeeper-engine

An init container runs it into an emptyDir. The unmodified vLLM container then starts
DIR/bin/fleetkeeper-engine with its own Python.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import fleetkeeper_contract
import fleetkeeper_engine
import fleetkeeper_steps

DISTRIBUTION = "fleetkeeper-engine"
PACKAGES = (fleetkeeper_engine, fleetkeeper_contract, fleetkeeper_steps)
OWN = {package.__name__.replace("_", "-") for package in PACKAGES}

LAUNCHER = '''#!/usr/bin/env python3
"""Start fleetkeeper-engine from the directory this file was installed into."""
import sys
from pathlib import Path

home = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(home / "own"))
sys.path.append(str(home / "dependencies"))

from fleetkeeper_engine.cli import main

main()
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `install`."""
    parser.add_argument("directory", type=Path)


def run(args: argparse.Namespace) -> int:
    """Install; return 0 if everything was copied."""
    try:
        install(args.directory)
    except OSError as error:
        sys.stderr.write(f"fleetkeeper-engine install: {error}\n")
        return 1
    return 0


def install(directory: Path) -> None:
    """Copy our packages, their requirements and the launcher, replacing existing files.

    Raises:
        OSError: if the directory cannot be written.
    """
    own, dependencies = directory / "own", directory / "dependencies"
    for folder in (own, dependencies):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(Path(package.__path__[0]), own / package.__name__, ignore=ignore)
    _write_metadata(metadata.distribution(DISTRIBUTION), own)
    for name in sorted(requirements_of(DISTRIBUTION) - OWN):
        _copy_distribution(metadata.distribution(name), dependencies)
    launcher = directory / "bin" / "fleetkeeper-engine"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)


def requirements_of(
    name: str, requires: Callable[[str], list[str] | None] = metadata.requires
) -> set[str]:
    """Return a distribution and everything it needs, without extras that nothing requests.

    Extras that a requirement names (`pyjwt[crypto]`) are followed. Requirements that are not
    installed are for other platforms, or optional, and are left out.
    """
    found: set[str] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        try:
            lines = requires(entry[0]) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(entry[0])
        waiting += [parsed for line in lines if (parsed := _parse_requirement(line, entry[1]))]
    return found


def _parse_requirement(line: str, extras: frozenset[str]) -> tuple[str, frozenset[str]] | None:
    """Return name and extras of `name[extra]>=1; marker`; None for an extra that was not requested."""
    wanted, _, marker = line.partition(";")
    asked = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    if asked and asked[1] not in extras:
        return None
    parts = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", wanted)
    if not parts:
        return None
    name = re.sub(r"[-_.]+", "-", parts[1]).lower()
    return name, frozenset(filter(None, re.split(r"\s*,\s*", parts[2] or "")))


def _write_metadata(distribution: metadata.Distribution, target: Path) -> None:
    """Write METADATA and entry points, through which vLLM finds our plugin."""
    folder = target / f"{fleetkeeper_engine.__name__}-{distribution.version}.dist-info"
    folder.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        text = distribution.read_text(name)
        if text is not None:
            (folder / name).write_text(text)


def _copy_distribution(distribution: metadata.Distribution, target: Path) -> None:
    for file in distribution.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        place = target / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(str(file.locate())), place)
