"""The environment of the engine container. Fleetkeeper's variables override the spec's."""

from __future__ import annotations

from fleetkeeper.api.parse import InferenceService
from fleetkeeper.api.profiles.pod_template import extended_resources
from fleetkeeper.api.profiles.profile import EffectiveResources, EngineProfile
from fleetkeeper.api.types import EnvironmentVariable, Model
from fleetkeeper.common.budget import ACCELERATORS_VARIABLE, OTHER_DEVICES_VARIABLE
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.manifests.engine_document import (
    DOCUMENT_VARIABLE,
    EngineOptionRefused,
    desired_engine_document,
    document_text,
)
from fleetkeeper.reconcile.manifests.model_volumes import (
    CACHE_DIR,
    downloads,
    loaded_model,
    streams,
)
from fleetkeeper.reconcile.manifests.tuning import EngineTuning

HOME_DIR = "/home/engine"
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""The keys of a Secret with credentials of object storage, and the variables of the same names."""


def desired_engine_environment(
    service: InferenceService,
    profile: EngineProfile,
    resources: EffectiveResources,
    tuning: EngineTuning,
) -> list[Manifest]:
    """Return the environment, sorted by name. Only the document configures vLLM.

    Raises:
        EngineOptionRefused: the spec holds options or variables that the profile does not allow.
    """
    spec = service.spec
    refused = [item.name for item in spec.engine.env if not profile.allows_variable(item)]
    if refused:
        raise EngineOptionRefused(
            f"engine profile {profile.name} does not allow the variables {', '.join(refused)}"
        )
    own = {
        DOCUMENT_VARIABLE: document_text(
            desired_engine_document(service, profile, resources, tuning)
        ),
        "HOME": HOME_DIR,
        "USER": "engine",
    }
    if resources.claimed_accelerators:
        own[ACCELERATORS_VARIABLE] = str(resources.claimed_accelerators)
    if others := extended_resources(profile.pod_template or {}):
        own[OTHER_DEVICES_VARIABLE] = " ".join(sorted(others))
    model = loaded_model(spec, profile)
    entries: dict[str, Manifest] = {
        **_entries(_hub_environment(model)),
        **_entries(_object_storage_environment(model, profile)),
        **{variable.name: _entry_of(variable) for variable in spec.engine.env},
        **_entries({**profile.variables, **own}),
        "POD_UID": {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}},
    }
    if model is not None:
        entries.update(_credentials(model))
    return [{"name": name, **entry} for name, entry in sorted(entries.items())]


def _credentials(model: Model) -> dict[str, Manifest]:
    found = {}
    token = model.token_secret
    if token is not None:
        found["HF_TOKEN"] = _of_secret(token.name, token.key)
    secret = model.credentials_secret
    if secret is not None:
        found.update({key: _of_secret(secret, key) for key in CREDENTIALS})
    return found


def _entries(values: dict[str, str]) -> dict[str, Manifest]:
    return {name: _of_value(value) for name, value in values.items()}


def _entry_of(variable: EnvironmentVariable) -> Manifest:
    if variable.value_from is None:
        return _of_value(variable.value or "")
    reference = variable.value_from.secret_key_ref
    return _of_secret(reference.name, reference.key)


def _of_value(value: str) -> Manifest:
    return {"value": value} if value else {}


def _of_secret(name: str, key: str) -> Manifest:
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _hub_environment(model: Model | None) -> dict[str, str]:
    """Return the download directory or, without downloads, the offline mode of the libraries."""
    if downloads(model):
        return {"HF_HOME": CACHE_DIR}
    return {"HF_HUB_OFFLINE": "1"}


def _object_storage_environment(model: Model | None, profile: EngineProfile) -> dict[str, str]:
    """Return the address of object storage, for the engine and the libraries that it uses.

    Without the last variable, an engine without credentials would use those of its node.
    """
    storage = profile.object_storage
    if not streams(model) or storage is None:
        return {}
    return {
        "AWS_DEFAULT_REGION": storage.region,
        "AWS_REGION": storage.region,
        **({"AWS_ENDPOINT_URL": storage.endpoint} if storage.endpoint else {}),
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0" if storage.path_style else "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
