"""Keys from a watch of a namespace's Secrets, accepted for a set time without the API server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

import structlog

from fleetkeeper_contract.client_keys import KEY_LABEL
from fleetkeeper_gateway.audit import create_audit_log
from fleetkeeper_gateway.interfaces import AuditLog, Key, KeyRefused
from fleetkeeper_gateway.keys import metrics
from fleetkeeper_gateway.keys.anonymous import AnonymousKeys
from fleetkeeper_gateway.keys.bearer import EXPIRED, UNAVAILABLE, digest_of_header, invalid
from fleetkeeper_gateway.keys.settings import KeysSettings
from fleetkeeper_gateway.keys.store import KeyStore, is_past
from fleetkeeper_gateway.kubernetes.settings import load_credentials
from fleetkeeper_gateway.kubernetes.watch import USER_AGENT, Watch
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.credentials import Credentials
from fleetkeeper_kube.resource import Resource

log = structlog.get_logger(__name__)

SECRETS: Final = Resource("Secret", "secrets", "v1")
SELECTOR: Final = f"{KEY_LABEL}=true"
HOUSEKEEPING_S: Final = 1.0
"""Interval of the sweep for expired keys."""


class WatchedKeys:
    """The keys of the Secrets in one namespace."""

    def __init__(
        self,
        settings: KeysSettings,
        credentials: Credentials,
        audit: AuditLog,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; `run` watches the keys."""
        self.store = KeyStore(audit)
        self._stale_s = settings.keys_stale_seconds
        self._monotonic = monotonic
        self._client = KubernetesClient(credentials, user_agent=USER_AGENT)
        self.watch = Watch(
            self._client,
            SECRETS,
            self.store,
            namespaces=(settings.keys_namespace,),
            selector=SELECTOR,
            monotonic=monotonic,
        )
        self._was_stale = False

    @property
    def synced(self) -> bool:
        """Return True after the first complete list."""
        return self.watch.synced

    @property
    def contact_age_s(self) -> float:
        """Return the seconds since the API server last confirmed the keys; NaN: never."""
        last = self.watch.last_contact
        return math.nan if last is None else self._monotonic() - last

    @property
    def is_stale(self) -> bool:
        """Return whether the keys were never confirmed, or too long ago."""
        return not self.contact_age_s <= self._stale_s

    def authenticate(self, authorization: str | None, now: float) -> Key:
        """Return the key of an Authorization header.

        Raises:
            KeyRefused: with code `missing_api_key`, `invalid_api_key`, `expired_api_key`, or with
                `keys_unavailable` if no key can be checked.
        """
        digest = digest_of_header(authorization)
        self._check_contact()
        record = self.store.find(digest)
        if record is None:
            raise invalid()
        if not record.accepts(digest, now):
            raise invalid(record.key.id)
        return _unexpired(record.key, now)

    def named(self, key_id: str, now: float) -> Key:
        """Return the key with an ID, for a process that sends requests on behalf of the key.

        Raises:
            KeyRefused: as `authenticate` does, without `missing_api_key`.
        """
        self._check_contact()
        key = self.store.named(key_id)
        if key is None:
            raise invalid(key_id)
        return _unexpired(key, now)

    def in_force(self, key_id: str, now: float) -> bool:
        """Return whether the key of an open request is neither revoked nor expired.

        Requests in progress continue while the API server is away, also beyond the set time: nothing
        shows that their key ended.
        """
        return self.store.is_usable(key_id) and not self.store.is_expired(key_id, now)

    def _check_contact(self) -> None:
        if self.is_stale:
            raise KeyRefused(
                UNAVAILABLE, "The gateway cannot check API keys at the moment. Try again later."
            )

    async def run(self) -> None:
        """Watch the Secrets until cancelled."""
        metrics.CONTACT_AGE.set_function(lambda: self.contact_age_s)
        async with self._client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watch.run())
            tasks.create_task(self._keep_house())

    async def _keep_house(self) -> None:
        while True:
            self.store.expire(time.time())
            is_stale = self.synced and self.is_stale
            if is_stale and not self._was_stale:
                log.error(
                    "client keys are stale: every request is refused until the API server answers",
                    contact_age_s=round(self.contact_age_s),
                )
            self._was_stale = is_stale
            await asyncio.sleep(HOUSEKEEPING_S)


def _unexpired(key: Key, now: float) -> Key:
    if is_past(key.expires, now):
        raise KeyRefused(EXPIRED, "The API key has expired.", key.id)
    return key


def create_keys(
    settings: KeysSettings, audit: AuditLog | None = None
) -> WatchedKeys | AnonymousKeys:
    """Return the keys that the settings describe; call `run` in a task.

    Raises:
        NoCredentials: the API server's address or our credentials cannot be loaded.
    """
    if settings.anonymous:
        log.warning("anonymous mode: requests need no key")
        return AnonymousKeys(settings)
    credentials = load_credentials(settings.kubeconfig)
    return WatchedKeys(settings, credentials, audit or create_audit_log())
