"""The volumes and mount paths of a model and its adapters.

`pvc://CLAIM/PATH` is mounted read-only at /models/CLAIM. `hf://ORG/NAME` is downloaded into /cache.
`s3://BUCKET/PREFIX` is streamed into memory and needs no volume.
The image of `oci://REGISTRY/REPOSITORY@sha256:DIGEST/PATH` is mounted read-only at /images/DIGEST.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.types import InferenceServiceSpec, Model
from fleetkeeper.api.values.quantity import canonical_quantity
from fleetkeeper.common.values import Manifest

MODELS_DIR = "/models"
CACHE_DIR = "/cache"
IMAGES_DIR = "/images"
CLAIM_SCHEME = "pvc://"
HUB_SCHEME = "hf://"
OBJECT_SCHEME = "s3://"
IMAGE_SCHEME = "oci://"
DIGEST_MARK = "@sha256:"


@dataclass(frozen=True, slots=True)
class ModelVolumes:
    """The volumes of a model and their mounts."""

    volumes: tuple[Manifest, ...]
    mounts: tuple[Manifest, ...]
    writes_claims: bool
    """True if the pod writes to a claim."""


def loaded_model(spec: InferenceServiceSpec, profile: EngineProfile) -> Model | None:
    """Return the model that engines with this profile load, None if they are simulated."""
    return None if profile.simulated else spec.model


def _sources(model: Model) -> Iterator[str]:
    yield model.source
    for adapter in model.adapters:
        yield adapter.source


def downloads(model: Model | None) -> bool:
    """Return True if the model or an adapter is downloaded from a hub."""
    return model is not None and any(item.startswith(HUB_SCHEME) for item in _sources(model))


def streams(model: Model | None) -> bool:
    """Return True if the model is streamed from object storage."""
    return model is not None and model.source.startswith(OBJECT_SCHEME)


def location_of(source: str) -> str:
    """Return the source in the engine's form: a directory in the pod, ORG/NAME of a hub, or s3://."""
    if source.startswith(OBJECT_SCHEME):
        return source
    if source.startswith(HUB_SCHEME):
        return source.removeprefix(HUB_SCHEME)
    if source.startswith(IMAGE_SCHEME):
        return f"{IMAGES_DIR}/{source.partition(DIGEST_MARK)[2]}"
    return f"{MODELS_DIR}/{source.removeprefix(CLAIM_SCHEME)}"


def _claims(model: Model) -> list[str]:
    """Return the names of the claims, each once, the model's first."""
    claims = (
        source.removeprefix(CLAIM_SCHEME).split("/", 1)[0]
        for source in _sources(model)
        if source.startswith(CLAIM_SCHEME)
    )
    return list(dict.fromkeys(claims))


def _images(model: Model) -> dict[str, str]:
    """Return the repository of each image by digest. The same digest is the same content anywhere."""
    images: dict[str, str] = {}
    for source in _sources(model):
        if source.startswith(IMAGE_SCHEME):
            repository, _, rest = source.removeprefix(IMAGE_SCHEME).partition(DIGEST_MARK)
            images.setdefault(rest.split("/", 1)[0], repository)
    return images


def desired_model_volumes(model: Model | None) -> ModelVolumes:
    """Return one read-only volume for each claim and each image, and the download cache if needed."""
    if model is None:
        return ModelVolumes((), (), writes_claims=False)
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    for number, claim in enumerate(_claims(model)):
        name = f"model-{number}"
        volumes.append(
            {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        )
        mounts.append({"name": name, "mountPath": f"{MODELS_DIR}/{claim}", "readOnly": True})
    for number, (digest, repository) in enumerate(_images(model).items()):
        name = f"model-image-{number}"
        reference = f"{repository}{DIGEST_MARK}{digest}"
        volumes.append(
            {"name": name, "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
        )
        mounts.append({"name": name, "mountPath": f"{IMAGES_DIR}/{digest}", "readOnly": True})
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
