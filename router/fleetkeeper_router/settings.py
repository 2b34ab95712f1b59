"""Settings of a router: the variables FLEETKEEPER_ROUTER_* of its pod."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

PREFIX: Final = "FLEETKEEPER_ROUTER_"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class Policy(StrEnum):
    """The policy by which a replica is chosen."""

    LEAST_LOADED = "LeastLoaded"
    SESSION_AFFINITY = "SessionAffinity"
    PREFIX_AWARE = "PrefixAware"
    ROUND_ROBIN = "RoundRobin"


class InvalidSettings(ValueError):
    """A variable has no value that can be used."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The variables, each under the name of its field in capitals."""

    engines: str
    """Name whose addresses are those of the engines, ready or not."""
    policy: Policy = Policy.LEAST_LOADED
    engine_port: int = 8000
    """Port of the engines for requests."""
    health_port: int = 9090
    """Port of the engines for /healthz/ready."""
    host: str = "0.0.0.0"  # noqa: S104 - a pod
    """Address to listen on."""
    port: int = 8080
    metrics_port: int = 29000
    admin_socket: str = "@fleetkeeper-router"
    """Envoy's admin interface: an abstract socket, or a path. Only this pod reaches it."""
    request_timeout_seconds: float = 3600.0
    """Longest time without a byte of an answer."""
    drain_seconds: float = 30.0
    """Longest time that streams have to end, after the notice."""
    notice_seconds: float = 10.0
    """Time between "not ready" and the end of new connections."""
    threads: int = 2
    connections: int = 16_384
    """Most connections of clients. Fewer if the pod may not have as many open files."""
    memory_bytes: int = 268_435_456
    """Memory of the pod."""
    resolver: str = ""
    """DNS server as ADDRESS:PORT; empty: that of the pod."""

    @property
    def heap_bytes(self) -> int:
        """Return the memory that Envoy may allocate. Its code and threads need the rest."""
        return self.memory_bytes * 3 // 4

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Return the settings of an environment. Variables without a value have their default.

        Raises:
            InvalidSettings: if a variable is wrong or missing, or no such variable exists.
        """
        given = {
            name.removeprefix(PREFIX).lower(): text
            for name, text in environment.items()
            if name.startswith(PREFIX) and text
        }
        found: dict[str, object] = {}
        for field in fields(cls):
            text = given.pop(field.name, None)
            if text is not None:
                found[field.name] = _parsed(field.name, str(field.type), text)
        if given:
            names = ", ".join(sorted(PREFIX + name.upper() for name in given))
            raise InvalidSettings(f"no such variable: {names}; remove it, or correct its name")
        if "engines" not in found:
            raise InvalidSettings(f"set {PREFIX}ENGINES to the name of the engines' Service")
        return cls(**found)  # type: ignore[arg-type]


def _parsed(name: str, kind: str, text: str) -> object:
    variable = PREFIX + name.upper()
    if kind == "Policy":
        if text not in list(Policy):
            raise InvalidSettings(f"{variable} is {text!r}; use {', '.join(Policy)}")
        return Policy(text)
    if kind in {"int", "float"}:
        return _number(variable, kind, text)
    if name == "engines" and not _HOST.fullmatch(text):
        raise InvalidSettings(
            f"{variable} is {text!r}, which is no host name; use the name of the engines' Service"
        )
    if name == "resolver":
        _address(variable, text)
    return text


def _number(variable: str, kind: str, text: str) -> int | float:
    try:
        value = int(text) if kind == "int" else float(text)
    except ValueError as error:
        raise InvalidSettings(
            f"{variable} is {text!r}, which is no number; use one from 0"
        ) from error
    if not math.isfinite(value) or value < 0:
        raise InvalidSettings(f"{variable} is {text}; use a number from 0")
    if variable.endswith("PORT") and value > 65_535:
        raise InvalidSettings(f"{variable} is {text}; ports end at 65535")
    return value


def _address(variable: str, text: str) -> None:
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError as error:
        raise InvalidSettings(f"{variable} is {text!r}; use ADDRESS:PORT") from error
    if not 0 < number <= 65_535:
        raise InvalidSettings(f"{variable} has port {number}; use one from 1 to 65535")
