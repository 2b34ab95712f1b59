"""The context of every plan, from the settings and the files that they name."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import yaml
from pydantic import ValidationError

from fleetkeeper.api.profiles.profile import ProfileCatalog
from fleetkeeper.reconcile.context import EMPTY_KEYS, PlanContext, default_context
from fleetkeeper.runtime.grant_keys import read_grant_keys
from fleetkeeper.runtime.settings import Settings, SettingsError

Setting = TypeVar("Setting")


def plan_context(settings: Settings) -> PlanContext:
    """Return the context of the installation for every plan.

    Raises:
        SettingsError: a file named in the settings is unusable.
    """
    default = default_context()
    return PlanContext(
        catalog=_catalog(settings.profiles_file) or default.catalog,
        router=settings.router,
        security=settings.security,
        image_pull_secrets=settings.image_pull_secrets,
        control_keys=_text(settings.control_jwks_file) or EMPTY_KEYS,
        grant_keys=_grant_keys(settings.grant_jwks_file),
        hold_s=settings.hold_s,
        operator_namespace=settings.operator_namespace,
        operator_peers=_given(settings.operator_peers, default.operator_peers),
        prometheus_peers=_given(settings.prometheus_peers, default.prometheus_peers),
        dns_rule=_given(settings.dns_rule, default.dns_rule),
        api_server_rule=settings.api_server_rule,
        model_hub_rule=_given(settings.model_hub_rule, default.model_hub_rule),
        object_storage_rule=settings.object_storage_rule,
        max_accelerators=settings.max_accelerators,
        max_accelerators_by_namespace=MappingProxyType(
            dict(settings.max_accelerators_by_namespace)
        ),
        floating_revisions=settings.floating_revisions,
        system_priority_classes=settings.system_priority_classes,
        engine_service_accounts=settings.engine_service_accounts,
        pod_metadata_names=settings.pod_metadata_names,
        exposed_service_types=settings.exposed_service_types,
    )


def _given(setting: Setting | None, default: Setting) -> Setting:
    return default if setting is None else setting


def _text(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as problem:
        raise SettingsError(f"cannot read {file}: {problem}") from problem


def _grant_keys(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return read_grant_keys(file)
    except (OSError, ValueError) as problem:
        raise SettingsError(f"cannot use the grant keys in {file}: {problem}") from problem


def _catalog(file: Path | None) -> ProfileCatalog | None:
    if file is None:
        return None
    try:
        return ProfileCatalog.model_validate(yaml.safe_load(_text(file)))
    except (yaml.YAMLError, ValidationError) as problem:
        raise SettingsError(f"invalid engine profiles in {file}: {problem}") from problem
