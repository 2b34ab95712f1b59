"""Interfaces between the packages of the gateway.

The request path (`http`) gets a `Services`, a `Keys`, a `Limiter`, a `Hold` and a `GrantSigner`. A package of its
own implements each, so that each can be tested, and replaced, alone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from fleetkeeper_contract.sleep import SleepState
from fleetkeeper_contract.tiers import Tier


@dataclass(frozen=True, slots=True)
class Sleeping:
    """The sleep of a service that is not awake, or the swap of its only replica, from its status."""

    number: int
    """Number of the sleep, which a wake mark names."""
    state: SleepState
    failures: int = 0
    """Failed starts in a row."""
    starts: tuple[int, ...] = ()
    """Durations of the last starts in seconds."""

    @property
    def ends_by_mark(self) -> bool:
        """Return True if a wake mark ends the state. The operator alone ends the other states."""
        return self.state in {SleepState.GOING_TO_SLEEP, SleepState.ASLEEP}


@dataclass(frozen=True, slots=True)
class Service:
    """The fields of an InferenceService that requests need."""

    namespace: str
    name: str
    uid: str
    models: tuple[str, ...]
    """Names that requests may use: the served name, and the names of the adapters."""
    url: str
    """Base address of its Service, without a path: http://NAME.NAMESPACE.svc:PORT. Empty while the
    operator does not own that Service: nothing is sent to it."""
    demands_grant: bool
    """True if spec.access is Gateway."""
    state: str
    """Short state to display, from the status: Ready, Starting, Suspended, Degraded, Unavailable, Asleep,
    Waking, Swapping, Unknown."""
    ready: bool
    """True while at least one replica accepts requests."""
    created: int
    """Unix seconds."""
    sleep: Sleeping | None = None
    """None while it is awake, and while it is suspended: then no request wakes it."""
    wakes_for_batch: bool = False
    """True if any line of a batch wakes it; otherwise the deadlines of batches decide."""

    @property
    def path(self) -> str:
        """Return NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Limits of one key in one tier. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


NO_LIMITS = TierLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """A client's key, without its secret."""

    id: str
    """Name of its Secret, or `anonymous`."""
    name: str
    namespaces: frozenset[str] | None
    """Namespaces of the services that the key may use; None: all (only the anonymous key)."""
    models: tuple[str, ...] = ("*",)
    """Globs, case-sensitive."""
    highest: Tier = Tier.STANDARD
    expires: float | None = None
    """Unix seconds; None: never."""
    limits: Mapping[Tier, TierLimits] = field(default_factory=dict)

    @property
    def tenant(self) -> Hashable:
        """Return the unit of fair sharing: the namespaces, so that further keys add nothing to a share."""
        return self.namespaces or self.id

    def sees(self, service: Service, model: str) -> bool:
        """Return whether the key may use this model of this service."""
        if self.namespaces is not None and service.namespace not in self.namespaces:
            return False
        return any(fnmatch.fnmatchcase(model, glob) for glob in self.models)


class Services(Protocol):
    """All services that the gateway has listed."""

    @property
    def synced(self) -> bool:
        """Return True after the first complete list."""

    def serving(self, model: str) -> Sequence[Service]:
        """Return the services that serve a model, of all namespaces."""

    def named(self, namespace: str, name: str) -> Service | None:
        """Return a service by its name."""

    def all(self) -> Iterable[Service]:
        """Return all services."""


class KeyRefused(Exception):
    """A key is not accepted. `code` is for the client's error body, `key_id` for the audit log."""

    def __init__(self, code: str, message: str, key_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.key_id = key_id


class Keys(Protocol):
    """The clients' keys that are valid now."""

    @property
    def synced(self) -> bool:
        """Return True after the first complete list."""

    def authenticate(self, authorization: str | None, now: float) -> Key:
        """Return the key of an Authorization header.

        Args:
            authorization: the header's value; None if absent.
            now: Unix seconds.

        Raises:
            KeyRefused: with code `missing_api_key`, `invalid_api_key` or `expired_api_key` (401), or
                `keys_unavailable` (503).
        """

    def named(self, key_id: str, now: float) -> Key:
        """Return the key with an ID, for a process that sends requests on behalf of the key.

        Args:
            key_id: of the key.
            now: Unix seconds.

        Raises:
            KeyRefused: as `authenticate` does, without `missing_api_key`.
        """

    def in_force(self, key_id: str, now: float) -> bool:
        """Return whether a key of an open request is still valid."""


class BatchTokens(Protocol):
    """Reads the bearer tokens of the batch process."""

    def key_of(self, token: str) -> str | None:
        """Return the ID of the key that a valid token names; None without a valid token."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The amounts that a request takes from its limits."""

    key: Key
    tier: Tier
    request_id: str
    tokens: int
    """Estimated tokens: body bytes / 4 + min(max_tokens, cap) * n."""


class LimitRefused(Exception):
    """A limit is reached. The request was not sent."""

    def __init__(
        self, limit: str, message: str, retry_after_s: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(message)
        self.limit = limit
        """Name of the limit: requests, tokens or concurrency."""
        self.retry_after_s = retry_after_s
        """Seconds until a retry, 1 to 60."""
        self.headers = headers
        """x-ratelimit-* headers, in lower case."""


class Admission(Protocol):
    """A request that its limits let through."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the x-ratelimit-* headers, in lower case."""

    async def release(self, *, sent: bool, least: int = 0) -> None:
        """End the request: release its concurrency slot, and its tokens if it was never sent.

        Args:
            sent: True if a service may have worked on it.
            least: minimum cost in tokens of a sent request, also if the engine counts fewer.
        """


class Limiter(Protocol):
    """The limits of all keys."""

    async def admit(self, demand: Demand) -> Admission:
        """Reserve the amounts of a request.

        Raises:
            LimitRefused: if a limit is reached. No limit is changed then.
        """

    async def settle(self, key_id: str, tier: Tier, request_id: str, tokens: int) -> None:
        """Replace a request's estimate by the tokens that the engine counted. The bucket may become negative."""

    async def close(self) -> None:
        """Close connections."""


class RequestLimiter(Limiter, Protocol):
    """The limits of all keys, in the process of the request path."""

    def check(self, key: Key, tier: Tier) -> None:
        """Refuse a request before its body is read, without a call to Redis.

        Raises:
            LimitRefused: if a request of any size would be refused.
        """


class HoldRefused(Exception):
    """A request for a service that sleeps is not held, or not anymore. Nothing was sent."""

    def __init__(self, code: str, why: str, retry_after_s: int) -> None:
        super().__init__(f"{why} Try again in {retry_after_s} s.")
        self.code = code
        """`service_asleep`, `service_waking`, `wake_failed`, `hold_full`, `service_unavailable`, `draining` or
        `model_not_found`."""
        self.retry_after_s = retry_after_s


class HeldPlace(AbstractContextManager["HeldPlace"], Protocol):
    """The place of a held request. Leaving the context without an exception means that it was answered."""

    async def turn(self) -> None:
        """Wait until the request may try.

        Raises:
            HoldRefused: if it is not held anymore.
        """

    def connected(self) -> None:
        """Note that the attempt has a connection."""

    def refused(self, *, is_shed: bool) -> None:
        """Take its place again after an attempt that was not accepted.

        Args:
            is_shed: True if a replica answered that it takes no more requests now.
        """


class Hold(Protocol):
    """The held requests for services that sleep."""

    @property
    def holding(self) -> Collection[str]:
        """Return the services (NAMESPACE/NAME) whose further requests go behind the held ones."""

    def place(
        self, service: Service, tier: Tier, tenant: Hashable, model: str, size: int
    ) -> HeldPlace:
        """Hold a request with a body of `size` bytes.

        Raises:
            HoldRefused: if it cannot be held.
        """

    def refusal(self, service: Service, *, wakes: bool = False) -> HoldRefused:
        """Return the refusal of a request that is never held, and mark its service if it `wakes`."""

    def drain(self) -> None:
        """End all holds, and begin no other."""


class GrantSigner(Protocol):
    """Signs grants with the current key."""

    def sign(
        self,
        service: Service,
        *,
        tier: Tier,
        key_id: str,
        request_id: str,
        hops: int,
    ) -> str:
        """Return a grant for a new attempt, valid at most 60 s."""


class AuditLog(Protocol):
    """Log of every use and change of a key, without content of requests and without secrets."""

    def request(
        self,
        *,
        key_id: str | None,
        request_id: str,
        service: str | None,
        model: str | None,
        tier: str | None,
        outcome: str,
        status: int,
        client: str,
    ) -> None:
        """Record the use of a key."""

    def change(self, *, key_id: str, change: str, actor: str | None) -> None:
        """Record a change of a key: created, changed, rotated, revoked, expired."""
