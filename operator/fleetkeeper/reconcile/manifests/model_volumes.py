"""The volumes and mount paths of a model and its adapters.

`pvc://CLAIM/PATH` is mounted read-only at /models/CLAIM. `hf://ORG/NAME` is downloaded into /cache.
`s3://BUCKET/PREFIX` is streamed into memory and needs no volume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetkeeper.api.quantity import canonical_quantity
from fleetkeeper.api.types import Model
from fleetkeeper.common.values import Manifest

MODELS_DIR = "/models"
CACHE_DIR = "/cache"
CLAIM_SCHEME = "pvc://"
HUB_SCHEME = "hf://"
OBJECT_SCHEME = "s3://"


@dataclass(frozen=True, slots=True)
class ModelVolumes:
    """The volumes of a model and their mounts. `writes_claims`: the pod writes to a claim."""

    volumes: tuple[Manifest, ...]
    mounts: tuple[Manifest, ...]
    writes_claims: bool


def _sources(model: Model) -> Iterator[str]:
    yield model.source
    for adapter in model.adapters:
        yield adapter.source


def downloads(model: Model) -> bool:
    """Return True if the model or an adapter is downloaded from a hub."""
    return any(source.startswith(HUB_SCHEME) for source in _sources(model))


def streams(model: Model) -> bool:
    """Return True if the model is streamed from object storage."""
    return model.source.startswith(OBJECT_SCHEME)


def location_of(source: str) -> str:
    """Return the source in the engine's form: a directory in the pod, ORG/NAME of a hub, or s3://."""
    if source.startswith(OBJECT_SCHEME):
        return source
    if source.startswith(HUB_SCHEME):
        return source.removeprefix(HUB_SCHEME)
    return f"{MODELS_DIR}/{source.removeprefix(CLAIM_SCHEME)}"


def _claims(model: Model) -> list[str]:
    """Return the names of the claims, each once, the model's first."""
    claims = (
        source.removeprefix(CLAIM_SCHEME).split("/", 1)[0]
        for source in _sources(model)
        if source.startswith(CLAIM_SCHEME)
    )
    return list(dict.fromkeys(claims))


def desired_model_volumes(model: Model) -> ModelVolumes:
    """Return the volumes: one read-only volume for each claim, and the download cache if needed."""
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
