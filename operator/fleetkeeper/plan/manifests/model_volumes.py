"""Where a model and its adapters come from, and where they lie in the pod.

`pvc://CLAIM/PATH` is mounted read-only at /models/CLAIM. `hf://ORG/NAME` is downloaded into /cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetkeeper.api.quantity import canonical_quantity
from fleetkeeper.api.types import Model
from fleetkeeper.plan.model import Manifest

MODELS_DIR = "/models"
CACHE_DIR = "/cache"
CLAIM_SCHEME = "pvc://"
HUB_SCHEME = "hf://"


@dataclass(frozen=True, slots=True)
class ModelVolumes:
    """The volumes of a model, where they are mounted, and whether the pod writes to a claim."""

    volumes: tuple[Manifest, ...]
    mounts: tuple[Manifest, ...]
    writes_claims: bool


def _sources(model: Model) -> Iterator[str]:
    yield model.source
    for adapter in model.adapters:
        yield adapter.source


def downloads(model: Model) -> bool:
    """Whether the model or an adapter is fetched from a hub."""
    return any(source.startswith(HUB_SCHEME) for source in _sources(model))


def location_of(source: str) -> str:
    """The source as the engine sees it: a directory in the pod, or ORG/NAME of a hub."""
    if source.startswith(HUB_SCHEME):
        return source.removeprefix(HUB_SCHEME)
    return f"{MODELS_DIR}/{source.removeprefix(CLAIM_SCHEME)}"


def _claims(model: Model) -> list[str]:
    """The claims, each once, the model's first."""
    claims = (
        source.removeprefix(CLAIM_SCHEME).split("/", 1)[0]
        for source in _sources(model)
        if source.startswith(CLAIM_SCHEME)
    )
    return list(dict.fromkeys(claims))


def desired_model_volumes(model: Model) -> ModelVolumes:
    """The volumes: one for each claim, read-only, and the download cache where it is needed."""
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    for number, claim in enumerate(_claims(model)):
        name = f"model-{number}"
        volumes.append(
            {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        )
        mounts.append({"name": name, "mountPath": f"{MODELS_DIR}/{claim}", "readOnly": True})
    cache = _cache(model) if downloads(model) else None
    if cache is not None:
        volumes.append({"name": "cache", **cache})
        mounts.append({"name": "cache", "mountPath": CACHE_DIR})
    return ModelVolumes(
        volumes=tuple(volumes),
        mounts=tuple(mounts),
        writes_claims=cache is not None and "persistentVolumeClaim" in cache,
    )


def _cache(model: Model) -> Manifest:
    if model.cache is not None and model.cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": model.cache.claim_name}}
    if model.cache is not None and model.cache.ephemeral_size is not None:
        return {"emptyDir": {"sizeLimit": canonical_quantity(model.cache.ephemeral_size)}}
    return {"emptyDir": {}}
