"""The operator's settings: typed, from a YAML file and from the environment, the latter first.

The file is named by `--config` or FLEETKEEPER_CONFIG; every setting has a variable too:
FLEETKEEPER_LOG_LEVEL, FLEETKEEPER_ROUTER__IMAGE, FLEETKEEPER_NAMESPACES='["a","b"]'. Keys in the
file are camelCase, as everywhere in Kubernetes.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
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

from fleetkeeper.adapters.kubernetes.lease import LONGEST_DURATION_S
from fleetkeeper.adapters.prometheus.queries import parse_selector
from fleetkeeper.adapters.prometheus.session import parse_address
from fleetkeeper.api.profile import ProfileCatalog
from fleetkeeper.api.quantity import BadQuantity, parse_quantity
from fleetkeeper.plan.context import (
    EMPTY_KEYS,
    NetworkPeer,
    NetworkRule,
    PlanContext,
    PodSecurity,
    RouterSettings,
    default_context,
)

ENV_CONFIG: Final = "FLEETKEEPER_CONFIG"
ENV_PREFIX: Final = "FLEETKEEPER_"
"""Of every variable."""
_ROUTER: Final = RouterSettings()


class SettingsError(ValueError):
    """The settings cannot be used; the message names every mistake, with its place."""


class _Section(BaseModel):
    """Camel case in files, snake case in code, nothing unknown."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )


class PeerSettings(_Section):
    """Who may talk to pods, or be talked to: by labels, or by addresses."""

    namespace_labels: dict[str, str] = Field(default_factory=dict, description="Of the namespace.")
    pod_labels: dict[str, str] = Field(default_factory=dict, description="Of the pods.")
    cidr: str = Field("", description="An address range; labels are not used with it.")
    cidr_except: tuple[str, ...] = Field((), description="Ranges in `cidr` that are left out.")

    def peer(self) -> NetworkPeer:
        """The same as a value of plans."""
        return NetworkPeer(
            namespace_labels=MappingProxyType(dict(self.namespace_labels)),
            pod_labels=MappingProxyType(dict(self.pod_labels)),
            cidr=self.cidr,
            cidr_except=self.cidr_except,
        )


class RuleSettings(_Section):
    """Peers and their ports."""

    peers: tuple[PeerSettings, ...] = Field((), description="Any of these.")
    tcp_ports: tuple[int, ...] = Field((), description="TCP ports; none at all means every port.")
    udp_ports: tuple[int, ...] = Field((), description="UDP ports.")

    def rule(self) -> NetworkRule:
        """The same as a value of plans."""
        return NetworkRule(
            peers=tuple(peer.peer() for peer in self.peers),
            tcp_ports=self.tcp_ports,
            udp_ports=self.udp_ports,
        )


class RouterConfig(_Section):
    """The router of each service."""

    image: str = Field(_ROUTER.image, description="The image with vllm-router.")
    cpu: str = Field(_ROUTER.cpu, description="Requested cores.")
    memory: str = Field(_ROUTER.memory, description="Request and limit.")
    role_kind: Literal["ClusterRole", "Role"] = Field(
        "ClusterRole", description="Kind of the fixed role that lets a router watch its pods."
    )
    role_name: str = Field(_ROUTER.role_name, description="Its name.")
    request_timeout_s: int = Field(
        _ROUTER.request_timeout_s, ge=1, description="The longest that one request may take."
    )


class SecurityConfig(_Section):
    """Who engine and router pods run as; null leaves it to the platform."""

    user: int | None = Field(65532, description="User id.")
    group: int | None = Field(65532, description="Group id.")


class LeaderConfig(_Section):
    """Leader election."""

    enabled: bool = Field(True, description="Whether to wait for the lease before the first write.")
    lease_name: str = Field("fleetkeeper", description="Name of the Lease.")
    duration_s: float = Field(
        15.0,
        gt=0,
        le=LONGEST_DURATION_S,
        description="Without a renewal for so long it is free; a longer duration in the Lease itself counts too.",
    )
    renew_deadline_s: float = Field(
        10.0, gt=0, description="A write needs a renewal younger than this."
    )
    retry_s: float = Field(2.0, gt=0, description="Between renewals, and between tries.")

    @model_validator(mode="after")
    def _fences(self) -> Self:
        if self.renew_deadline_s + 4.0 >= self.duration_s:
            raise ValueError(
                "durationS must exceed renewDeadlineS by more than 4 s, the time a write may take"
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
        (), description="Namespaces to serve. Empty: all of the cluster."
    )
    operator_namespace: str = Field(
        "fleetkeeper-system", description="Where the operator runs and its Lease is."
    )
    identity: str = Field(
        "",
        validation_alias=AliasChoices("identity", "FLEETKEEPER_IDENTITY", "POD_UID"),
        description="Who this process is: the pod's UID. A restarted container is the same.",
    )
    kubeconfig: Path | None = Field(
        None,
        validation_alias=AliasChoices("kubeconfig", "FLEETKEEPER_KUBECONFIG", "KUBECONFIG"),
        description="Outside a cluster: the kubeconfig to use.",
    )
    listen_address: str = Field("0.0.0.0", description="Where health and metrics are served.")  # noqa: S104 -- probes and Prometheus come from other addresses
    listen_port: int = Field(8080, ge=0, le=65535, description="Its port; 0 takes any free one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least that is logged."
    )
    log_format: Literal["json", "console"] = Field("json", description="For machines or people.")
    workers: int = Field(
        64,
        ge=1,
        le=256,
        description="Services looked at at a time. More than requests: some wait for their cluster address.",
    )
    requests_in_flight: int = Field(
        24, ge=1, le=256, description="Requests to the Kubernetes API at a time."
    )
    resync_s: float = Field(
        300.0, ge=5.0, description="Between full resyncs, each with a plain list of all services."
    )
    list_page_size: int = Field(200, ge=10, le=1000, description="Objects a page of a list.")
    leader: LeaderConfig = Field(LeaderConfig(), description="Leader election.")
    prometheus_url: SecretStr = Field(
        SecretStr(""),
        description="Address of Prometheus, also with a user and a password, which are never logged. Empty: none.",
    )
    prometheus_selector: str = Field(
        "",
        description='Label matchers that are added to every query, for example `job="fleetkeeper-engines"`: only these series are believed.',
    )
    prometheus_ca_file: Path | None = Field(
        None, description="The CA that signed Prometheus' certificate; none: the system's."
    )
    prometheus_token_file: Path | None = Field(
        None, description="A bearer token for Prometheus, read anew at every tick."
    )
    control_enabled: bool = Field(
        True,
        description="Whether the control loop runs. False: services are kept as asked, nothing is measured or steered.",
    )
    direct_reads: bool = Field(
        True,
        description="Whether replicas' metrics ports are read directly where Prometheus knows nothing of them. False: they are never called to be read, and none is deleted as hung or fragmented.",
    )
    tick_s: float = Field(
        5.0, ge=1.0, le=60.0, description="Between two control decisions; the scrape interval."
    )
    control_key_file: Path | None = Field(
        None, description="The private key that signs orders to engines."
    )
    control_jwks_file: Path | None = Field(
        None, description="The public keys (JWKS) that engines shall trust."
    )
    profiles_file: Path | None = Field(
        None, description="The engine profiles; none: those built in."
    )
    router: RouterConfig = Field(RouterConfig(), description="The router of each service.")
    security: SecurityConfig = Field(SecurityConfig(), description="Who pods run as.")
    image_pull_secrets: tuple[str, ...] = Field((), description="For our own images.")
    operator_peers: tuple[PeerSettings, ...] | None = Field(
        None, description="Who steers engines; null: the operator's own pods."
    )
    prometheus_peers: tuple[PeerSettings, ...] | None = Field(
        None, description="Who scrapes; null: the namespace `monitoring`."
    )
    dns_rule: RuleSettings | None = Field(
        None, description="Where names are resolved; null: kube-dns and NodeLocal DNSCache."
    )
    api_server_rule: RuleSettings | None = Field(None, description="Where routers find the API.")
    model_hub_rule: RuleSettings | None = Field(
        None, description="Where engines download hf:// models; null: the internet by HTTPS."
    )
    max_accelerators: int | None = Field(None, ge=0, description="GPUs of all services together.")
    max_accelerators_by_namespace: dict[str, int] = Field(
        default_factory=dict, description="GPUs by namespace; `*` for those not named."
    )
    floating_revisions: bool = Field(
        False, description="Whether hf:// models may name a branch, a tag or nothing."
    )
    refuse_second_release: bool = Field(
        True,
        description="Whether to refuse namespaces that an older release of Fleetkeeper serves.",
    )
    system_priority_classes: bool = Field(
        False,
        description="Whether services may use Kubernetes' own PriorityClasses (system-...), whose pods evict all others.",
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
        """The environment goes before the file, which arrives as keyword arguments."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings

    @property
    def shown(self) -> dict[str, Any]:
        """Return everything for the log at start; keys are named by file, an address without its credentials."""
        url = self.prometheus_url.get_secret_value()
        address = parse_address(url).url if url else ""
        return {**self.model_dump(mode="json"), "prometheus_url": address}

    @field_validator("prometheus_url")
    @classmethod
    def _is_address(cls, url: SecretStr) -> SecretStr:
        """Refuse what is no address, in words that do not repeat it."""
        if url.get_secret_value():
            parse_address(url.get_secret_value())
        return url

    @field_validator("prometheus_selector")
    @classmethod
    def _is_selector(cls, text: str) -> str:
        return parse_selector(text)

    @property
    def release(self) -> str:
        """NAMESPACE/NAME of the release, the same for all its replicas."""
        return f"{self.operator_namespace}/{self.leader.lease_name}"

    @property
    def process_identity(self) -> str:
        """Who this process is in the lease: never that of another process."""
        return self.identity or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def load_settings(file: Path | None = None, **overrides: object) -> Settings:
    """The settings from `file` (else from the one that FLEETKEEPER_CONFIG names) and the environment.

    Raises:
        SettingsError: the file cannot be read, or values are wrong.
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
            f"settings from {named or 'the environment'}: " + "; ".join(mistakes)
        ) from problem


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as problem:
        # The error's own text quotes the line, which may hold credentials.
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


def plan_context(settings: Settings) -> PlanContext:
    """What every plan may know of the installation.

    Raises:
        SettingsError: a file named in the settings, or a quantity in them, cannot be used.
    """
    default = default_context()
    return PlanContext(
        catalog=_catalog(settings.profiles_file) or default.catalog,
        router=_router(settings.router),
        security=PodSecurity(**settings.security.model_dump()),
        image_pull_secrets=settings.image_pull_secrets,
        control_keys=_text(settings.control_jwks_file) or EMPTY_KEYS,
        operator_namespace=settings.operator_namespace,
        operator_peers=_peers(settings.operator_peers, default.operator_peers),
        prometheus_peers=_peers(settings.prometheus_peers, default.prometheus_peers),
        dns_rule=settings.dns_rule.rule() if settings.dns_rule else default.dns_rule,
        api_server_rule=settings.api_server_rule.rule() if settings.api_server_rule else None,
        model_hub_rule=settings.model_hub_rule.rule()
        if settings.model_hub_rule
        else default.model_hub_rule,
        max_accelerators=settings.max_accelerators,
        max_accelerators_by_namespace=MappingProxyType(
            dict(settings.max_accelerators_by_namespace)
        ),
        floating_revisions=settings.floating_revisions,
        system_priority_classes=settings.system_priority_classes,
    )


def _router(config: RouterConfig) -> RouterSettings:
    """The router's settings; its quantities would else fail in the plan of every service."""
    for name in ("cpu", "memory"):
        try:
            parse_quantity(getattr(config, name))
        except BadQuantity as problem:
            raise SettingsError(f"router.{name}: {problem}") from problem
    return RouterSettings(**config.model_dump())


def _peers(
    given: tuple[PeerSettings, ...] | None, default: tuple[NetworkPeer, ...]
) -> tuple[NetworkPeer, ...]:
    return default if given is None else tuple(peer.peer() for peer in given)


def _text(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as problem:
        raise SettingsError(f"cannot read {file}: {problem}") from problem


def _catalog(file: Path | None) -> ProfileCatalog | None:
    if file is None:
        return None
    try:
        return ProfileCatalog.model_validate(yaml.safe_load(_text(file)))
    except (yaml.YAMLError, ValidationError) as problem:
        raise SettingsError(f"engine profiles in {file}: {problem}") from problem
