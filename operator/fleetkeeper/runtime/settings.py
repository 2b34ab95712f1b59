"""The operator's typed settings, from a YAML file and from the environment, which takes precedence.

`--config` or FLEETKEEPER_CONFIG names the file. Every setting has a variable too:
FLEETKEEPER_LOG_LEVEL, FLEETKEEPER_ROUTER__IMAGE, FLEETKEEPER_NAMESPACES='["a","b"]'. Keys in the
file are camelCase, as everywhere in Kubernetes.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from fleetkeeper.adapters.kubernetes.lease import MAX_DURATION_S
from fleetkeeper.adapters.prometheus.address import parse_address
from fleetkeeper.adapters.prometheus.queries import parse_selector
from fleetkeeper.api.base import Section
from fleetkeeper.api.profiles.metadata_names import DEFAULT_ALLOWED
from fleetkeeper.reconcile.context import NetworkPeer, NetworkRule, PodSecurity, RouterSettings

ENV_CONFIG: Final = "FLEETKEEPER_CONFIG"
ENV_PREFIX: Final = "FLEETKEEPER_"
"""Prefix of every environment variable."""


MetadataPattern = Annotated[
    str, Field(min_length=1, max_length=317, pattern=r"^([A-Za-z0-9][-A-Za-z0-9_./]*)?\*?$")
]
AccountPattern = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^([a-z0-9][-a-z0-9.]*)?\*?$")
]


class SettingsError(ValueError):
    """Invalid settings; the message names every mistake and its place."""


class LeaderConfig(Section):
    """Leader election."""

    enabled: bool = Field(True, description="Wait for the Lease before the first write.")
    lease_name: str = Field("fleetkeeper", description="Name of the Lease.")
    duration_s: float = Field(
        15.0,
        gt=0,
        le=MAX_DURATION_S,
        description="Time without a renewal after which the Lease is free. A longer duration in the Lease itself takes precedence.",
    )
    renew_deadline_s: float = Field(
        10.0, gt=0, description="Maximum age of the last renewal for a write to be sent."
    )
    retry_s: float = Field(
        2.0, gt=0, description="Time between renewals, and between attempts to acquire the Lease."
    )

    @model_validator(mode="after")
    def _fences(self) -> Self:
        if self.renew_deadline_s + 4.0 >= self.duration_s:
            raise ValueError(
                "durationS must exceed renewDeadlineS by more than 4 s, the time that a write can take"
            )
        return self


class Settings(BaseSettings):
    """All settings of the operator."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        populate_by_name=True,
        alias_generator=None,
    )

    namespaces: tuple[str, ...] = Field(
        (), description="Namespaces to serve. Empty: all namespaces of the cluster."
    )
    operator_namespace: str = Field(
        "fleetkeeper-system", description="Namespace of the operator and its Lease."
    )
    identity: str = Field(
        "",
        validation_alias=AliasChoices("identity", "FLEETKEEPER_IDENTITY", "POD_UID"),
        description="Identity of this process in the Lease: the pod's UID, which a restarted container keeps.",
    )
    kubeconfig: Path | None = Field(
        None,
        validation_alias=AliasChoices("kubeconfig", "FLEETKEEPER_KUBECONFIG", "KUBECONFIG"),
        description="The kubeconfig to use outside a cluster. Null: the pod's service account.",
    )
    listen_address: str = Field("0.0.0.0", description="Address that serves health and metrics.")  # noqa: S104 -- probes and Prometheus come from other addresses
    listen_port: int = Field(
        8080, ge=0, le=65535, description="Port that serves health and metrics; 0: any free port."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level that is logged."
    )
    log_format: Literal["json", "console"] = Field(
        "json", description="Log format: `json` for machines, `console` for people."
    )
    workers: int = Field(
        64,
        ge=1,
        le=256,
        description="Services reconciled at a time. More than `requestsInFlight`, because some wait for the cluster IP of a Service.",
    )
    requests_in_flight: int = Field(
        24, ge=1, le=256, description="Requests to the Kubernetes API at a time."
    )
    resync_s: float = Field(
        300.0, ge=5.0, description="Time between full resyncs, each of which lists all services."
    )
    list_page_size: int = Field(
        200, ge=10, le=1000, description="Maximum number of objects per page of a list."
    )
    leader: LeaderConfig = Field(LeaderConfig(), description="Leader election.")
    prometheus_url: SecretStr = Field(
        SecretStr(""),
        description="URL of Prometheus. It may contain a user and a password, which are never logged. Empty: no Prometheus.",
    )
    prometheus_selector: str = Field(
        "",
        description='Label matchers that are added to every query, for example `job="fleetkeeper-engines"`. Only matching series are used.',
    )
    prometheus_batch_selector: str = Field(
        "",
        description='Label matchers of the batch process, for example `namespace="fleetkeeper-system"`. Replicas are added in time for the deadlines in its metrics. Empty: they are not read.',
    )
    prometheus_ca_file: Path | None = Field(
        None, description="CA that signed Prometheus' certificate. Null: the system's CAs."
    )
    prometheus_token_file: Path | None = Field(
        None, description="File with a bearer token for Prometheus, read again at every tick."
    )
    control_enabled: bool = Field(
        True,
        description="Run the control loop. If false, services are kept as specified, and nothing is measured or controlled.",
    )
    direct_reads: bool = Field(
        True,
        description="Read the metrics ports of replicas directly where Prometheus does not know them. If false, they are never read, and no replica is deleted as hung or fragmented.",
    )
    control_key_file: Path | None = Field(
        None, description="Private key that signs limits requests to engines."
    )
    control_jwks_file: Path | None = Field(
        None, description="Public keys (JWKS) that engines trust."
    )
    grant_jwks_file: Path | None = Field(
        None,
        description="Public keys (JWKS) of the gateway, read again when the file changes. Null: no gateway; services with access: Gateway refuse every request.",
    )
    wake_marks: str = Field(
        "",
        description="ConfigMap in the operator's namespace in which gateways mark the sleeping services that requests wait for. Empty: no service goes to sleep.",
    )
    helm_release: str = Field(
        "",
        description="Helm release of the operator. A ConfigMap of wake marks that the operator creates belongs to it, so that an upgrade of the release accepts the ConfigMap. Empty: none.",
    )
    hold_s: float = Field(
        0.0,
        ge=0,
        description="Time for which the gateway holds requests (its `hold.seconds`). With `rollout.strategy: Auto`, an only replica is swapped if its start takes at most half of it. 0: never.",
    )
    profiles_file: Path | None = Field(
        None, description="Engine profiles. Null: the built-in profiles."
    )
    router: RouterSettings = Field(RouterSettings(), description="The router of each service.")
    security: PodSecurity = Field(
        PodSecurity(), description="User and group of engine and router pods."
    )
    image_pull_secrets: tuple[str, ...] = Field(
        (), description="Image pull secrets for Fleetkeeper's own images."
    )
    operator_peers: tuple[NetworkPeer, ...] | None = Field(
        None, description="Peers that may control engines. Null: the operator's own pods."
    )
    prometheus_peers: tuple[NetworkPeer, ...] | None = Field(
        None, description="Peers that may scrape metrics. Null: the namespace `monitoring`."
    )
    dns_rule: NetworkRule | None = Field(
        None, description="DNS servers of pods. Null: kube-dns and NodeLocal DNSCache."
    )
    api_server_rule: NetworkRule | None = Field(
        None,
        description="API server, as routers of an earlier release reach it. Null: TCP ports 443 and 6443 of any address.",
    )
    model_hub_rule: NetworkRule | None = Field(
        None,
        description="Hosts from which engines download hf:// models. Null: the internet over HTTPS.",
    )
    object_storage_rule: NetworkRule | None = Field(
        None,
        description="Hosts from which engines stream s3:// models. Null: the internet on the port of the engine profile's endpoint.",
    )
    max_accelerators: int | None = Field(
        None, ge=0, description="Maximum GPUs of all services together. Null: no limit."
    )
    max_accelerators_by_namespace: dict[str, int] = Field(
        default_factory=dict,
        description="Maximum GPUs per namespace; `*` is for namespaces not listed.",
    )
    floating_revisions: bool = Field(
        False, description="Allow hf:// models with a branch, a tag or no revision."
    )
    refuse_second_release: bool = Field(
        True, description="Refuse namespaces that an older release of Fleetkeeper serves."
    )
    system_priority_classes: bool = Field(
        False,
        description="Allow services to use Kubernetes' own PriorityClasses (system-...), whose pods preempt all others.",
    )
    engine_service_accounts: tuple[AccountPattern, ...] = Field(
        (),
        description="ServiceAccounts that services may use for their engines (serviceAccountName), by name. A trailing `*` allows a prefix. Empty: none.",
    )
    pod_metadata_names: tuple[MetadataPattern, ...] = Field(
        DEFAULT_ALLOWED,
        description="Names of labels and annotations that services may set in `podMetadata`, in addition to names without a dot and a domain and to harmless names of Kubernetes. A trailing `*` allows a prefix.",
    )
    exposed_service_types: tuple[Literal["NodePort", "LoadBalancer"], ...] = Field(
        (),
        description="Types in `spec.service.type` that services may use in addition to ClusterIP. They expose a service, which has no authentication, outside the cluster.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Prefer the environment to the file, which arrives as keyword arguments."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings

    @property
    def shown(self) -> dict[str, Any]:
        """All settings for the start-up log: keys as file names, URLs without credentials."""
        url = self.prometheus_url.get_secret_value()
        address = parse_address(url).url if url else ""
        return {**self.model_dump(mode="json"), "prometheus_url": address}

    @field_validator("prometheus_url")
    @classmethod
    def _is_address(cls, url: SecretStr) -> SecretStr:
        """Refuse an invalid URL with a message that does not repeat it."""
        if url.get_secret_value():
            parse_address(url.get_secret_value())
        return url

    @field_validator("prometheus_selector", "prometheus_batch_selector")
    @classmethod
    def _is_selector(cls, text: str) -> str:
        return parse_selector(text)

    @property
    def release(self) -> str:
        """NAMESPACE/NAME of the release, the same for all replicas of the operator."""
        return f"{self.operator_namespace}/{self.leader.lease_name}"

    @property
    def process_identity(self) -> str:
        """The identity of this process in the Lease, unique to it."""
        return self.identity or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def load_settings(file: Path | None = None, **overrides: object) -> Settings:
    """Return the settings from `file` (default: FLEETKEEPER_CONFIG) and the environment.

    Raises:
        SettingsError: the file cannot be read, or a value is invalid.
    """
    named = file or (Path(os.environ[ENV_CONFIG]) if os.environ.get(ENV_CONFIG) else None)
    values: dict[str, Any] = _read(named) if named else {}
    try:
        return Settings(**{**values, **overrides})
    except ValidationError as problem:
        mistakes = [
            f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in problem.errors()
        ]
        raise SettingsError(
            f"invalid settings in {named or 'the environment'}: " + "; ".join(mistakes)
        ) from problem


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as problem:
        # The error's own text quotes the line, which may contain credentials.
        line = problem.problem_mark.line + 1 if problem.problem_mark else "?"
        raise SettingsError(
            f"cannot read the settings in {file}: {problem.problem} in line {line}"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as problem:
        raise SettingsError(f"cannot read the settings in {file}: {problem}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"the settings in {file} must be a map of names to values")
    snake = {to_camel(name): name for name in Settings.model_fields}
    return {snake.get(str(name), str(name)): value for name, value in found.items()}
