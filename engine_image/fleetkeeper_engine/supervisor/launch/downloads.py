"""Downloads of models and adapters, each in a process of our own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.spec import EngineDocument
from fleetkeeper_engine.supervisor.launch import fetch, fetch_objects
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.object_storage import is_object_storage
from fleetkeeper_engine.supervisor.process import Child
from fleetkeeper_engine.supervisor.termination import classify_death

PACKAGE_PATH = str(Path(__file__).resolve().parents[3])
"""The directory that contains fleetkeeper_engine, for the started processes."""

Spawn = Callable[[list[str], Mapping[str, str]], Awaitable[Child]]


async def download_models(
    document: EngineDocument, environment: Mapping[str, str], spawn: Spawn
) -> None:
    """Download the model and its adapters from the hub into the cache. Others need no download.

    Raises:
        StartRefusedError: one of them cannot be downloaded.
    """
    model = document.model
    if not is_object_storage(model.source):
        await fetched_directory(model.source, model.revision, environment, spawn)
    for adapter in model.adapters:
        await fetched_directory(adapter.path, adapter.revision, environment, spawn)


async def fetched_directory(
    source: str, revision: str | None, environment: Mapping[str, str], spawn: Spawn
) -> Path:
    """Return the directory of a model or adapter, after fetching it if it is from the hub."""
    if source.startswith("/"):
        return Path(source)
    if source.count("/") != 1:
        raise StartRefusedError(
            DeathClass.MODEL_NOT_FOUND,
            f"{source!r} is neither an absolute directory nor ORG/NAME of a Hugging Face model",
        )
    return await _fetched([fetch.__name__, source, revision or ""], environment, spawn)


async def fetched_objects(source: str, environment: Mapping[str, str], spawn: Spawn) -> Path:
    """Return a directory with the configuration of a model in object storage, and its weights' headers."""
    parent = Path(environment.get("HOME") or tempfile.gettempdir()) / ".cache" / "fleetkeeper"
    return await _fetched([fetch_objects.__name__, source, str(parent)], environment, spawn)


async def _fetched(words: list[str], environment: Mapping[str, str], spawn: Spawn) -> Path:
    """Return the directory that a process of our own downloads.

    Raises:
        StartRefusedError: it failed. Its output decides the class.
    """
    child = await spawn([sys.executable, "-m", *words], own_environment(environment))
    status = await child.ended
    if child.tee is not None:
        await child.tee
    lines = list(child.lines)
    marked = [line.removeprefix(fetch.MARK) for line in lines if line.startswith(fetch.MARK)]
    if status or not marked:
        death = classify_death(lines, status=status, phase="start")
        raise StartRefusedError(death.death, death.message, "start")
    return Path(marked[-1])


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of our own, which finds our package."""
    path = ":".join(filter(None, [PACKAGE_PATH, environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}
