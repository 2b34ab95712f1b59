"""Settings of the connection to the API server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fleetkeeper_kube.credentials import Credentials, json_credentials, pod_credentials

ENV_PREFIX = "FLEETKEEPER_GATEWAY_"
"""Prefix of the environment variables of every part of the gateway."""


class KubernetesSettings(BaseSettings):
    """The API server and our credentials."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, hide_input_in_errors=True, extra="ignore"
    )

    kubeconfig: Path | None = Field(
        None,
        description="Kubeconfig in JSON, to run outside a cluster. Empty: the pod's ServiceAccount.",
    )

    @field_validator("kubeconfig", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return value or None


def load_credentials(kubeconfig: Path | None) -> Credentials:
    """Return credentials from a kubeconfig in JSON, or the pod's ServiceAccount if it is None.

    Raises:
        NoCredentials: they cannot be loaded.
    """
    if kubeconfig is None:
        return pod_credentials(f"{ENV_PREFIX}KUBECONFIG")
    return json_credentials(kubeconfig)
