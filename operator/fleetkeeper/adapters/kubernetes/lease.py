"""Leader election by a Lease, and the fence that enforces it.

A Lease alone fences nothing: the API server accepts writes from any process. So the leader enforces its
own deadline. It sends a write only within `renew_deadline_s` of the last renewal that was *sent* (not
answered), by its monotonic clock, and the write times out 4 s later. No other process takes the lease
until it has seen no renewal for `duration_s`, by its own monotonic clock. Because 10 + 4 < 15, no write
of an old leader overlaps a write of the new leader, with any error of the wall clocks.

That time cannot be shortened: a standby waits for its own duration or for that in the Lease, whichever
is longer, and for its own also if the Lease was deleted. Nor can it be extended without limit: a
duration in the Lease counts as `MAX_DURATION_S` at most, which no operator's own setting exceeds.
A user who may write the Lease can still hold it by renewing it.

The lease needs a separate client, so that a renewal never waits for another request or after a 429.

The holder's identity is the UID of its pod. So a container that was restarted in the same pod continues
at once, because the process that held the lease before is known to be gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from fleetkeeper.adapters.kubernetes.resources import LEASE
from fleetkeeper_kube.client import KubernetesClient
from fleetkeeper_kube.errors import ApiError

SEND_TIMEOUT_S: Final = 4.0
MAX_DURATION_S: Final = 300.0
"""The upper bound of the setting, and so of any duration that a holder can have configured."""

ANNOTATION_EPOCH = "fleetkeeper.io/epoch"
"""The annotation of the Lease with the leader's epoch, which is part of signed limits requests."""
EPOCH_DIGITS = 15


class LeaseLost(RuntimeError):
    """The loss or lack of the lease. This process writes nothing and ends."""


class LeaseClock(Protocol):
    """The clocks that a lease needs."""

    def now(self) -> float:
        """Return the seconds since the epoch."""

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment."""

    def jitter(self, seconds: float) -> float:
        """Return somewhat less than `seconds`."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The name of the lease, the identity of the candidate, and the times in seconds."""

    namespace: str
    name: str
    identity: str
    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0


@dataclass(frozen=True, slots=True)
class _Held:
    """The fields of a Lease whose changes show that its holder is alive."""

    holder: str
    renewed: str
    transitions: int
    duration_s: float = field(compare=False)
    """A change of this field alone shows nothing."""

    def with_longest_duration(self, before: _Held | None) -> _Held:
        """Return this state with the longest duration seen from the same holder."""
        if before is None or before.holder != self.holder:
            return self
        return replace(self, duration_s=max(self.duration_s, before.duration_s))


class LeaderLease:
    """One process's claim on the lease."""

    def __init__(
        self,
        client: KubernetesClient,
        terms: LeaseTerms,
        clock: LeaseClock,
        *,
        on_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._terms = terms
        self._clock = clock
        self._on_write = on_write
        self._renewed: float | None = None
        self._released = False
        self._lease: dict[str, Any] = {}

    @property
    def holds(self) -> bool:
        """True while a write may be sent."""
        return (
            not self._released
            and self._renewed is not None
            and self._clock.monotonic() - self._renewed < self._terms.renew_deadline_s
        )

    @property
    def epoch(self) -> int:
        """A number that rises with each new leader, even if the Lease was deleted in between.

        It is stored in the Lease: one more than the last leader's, and never below the clock.
        """
        return _epoch(self._lease)

    def check(self) -> None:
        """Check that a write may be sent now: the fence.

        Raises:
            LeaseLost: the last renewal is too old, or there was none.
        """
        if not self.holds:
            raise LeaseLost(
                f"lease {self._terms.namespace}/{self._terms.name} was not renewed within {self._terms.renew_deadline_s:g} s"
            )

    async def acquire(self) -> None:
        """Wait until this process holds the lease.

        Whether another holder has expired is decided by the changes seen, never by the time in the
        Lease: the clocks of two nodes may differ by any amount.

        Raises:
            ApiError: reading or writing the lease is denied (401, 403).
        """
        last: _Held | None = None
        changed_at = self._clock.monotonic()
        while True:
            try:
                found = await self._client.read(LEASE, self._terms.namespace, self._terms.name)
                held = _held(found)
                if held is not None:  # the holder of a deleted Lease may still be alive
                    if held != last:
                        changed_at = self._clock.monotonic()
                    last = held.with_longest_duration(last)
                silent_s = self._clock.monotonic() - changed_at
                if self._is_free(last, silent_s) and await self._take(found):
                    return
            except ApiError as problem:
                if problem.status in {401, 403}:
                    raise
            await asyncio.sleep(self._clock.jitter(self._terms.retry_s))

    async def keep(self) -> None:
        """Renew the lease until that fails.

        Raises:
            LeaseLost: another process holds it, or renewals failed until the deadline.
        """
        sent = self._clock.monotonic()
        while True:
            # Measured from send to send, so a renewal that timed out is followed by another at once.
            await asyncio.sleep(self._terms.retry_s - (self._clock.monotonic() - sent))
            self.check()
            sent = self._clock.monotonic()
            try:
                await self._put(sent, self._lease)
            except ApiError as problem:
                if problem.is_stale or problem.is_absent:
                    await self._renew_reread()

    async def release(self, *, after: Callable[[], Awaitable[None]]) -> None:
        """Release the lease, so that a standby does not have to wait for it to expire.

        The fence closes at once. Then `after` is awaited, which returns when no write of this process
        can be applied anymore. A lease that expired meanwhile is not written.

        Nothing is raised: if the release fails, the lease expires.
        """
        if not self.holds:
            return
        self._released = True
        await after()
        try:
            await self._free(self._lease)
        except ApiError as problem:
            if not problem.is_stale:
                return
            # A renewal that was cancelled at the end may have been applied nevertheless.
            with contextlib.suppress(ApiError):
                found = await self._client.read(LEASE, self._terms.namespace, self._terms.name)
                held = _held(found)
                if found is not None and held and held.holder == self._terms.identity:
                    await self._free(found)

    async def _free(self, lease: Mapping[str, Any]) -> None:
        freed = self._body(lease, holder="")
        freed["spec"]["leaseDurationSeconds"] = 1
        await self._send("PUT", self._terms.name, freed)

    def _is_free(self, held: _Held | None, silent_s: float) -> bool:
        return (
            held is None
            or held.holder in {"", self._terms.identity}
            or silent_s >= max(self._terms.duration_s, min(held.duration_s, MAX_DURATION_S))
        )

    async def _take(self, found: Mapping[str, Any] | None) -> bool:
        """Take the lease; return whether it is ours now. False if another process was faster."""
        sent = self._clock.monotonic()
        try:
            if found is None:
                self._lease = await self._send("POST", "", self._body({}, self._terms.identity))
                self._renewed = sent
            else:
                await self._put(sent, found)
        except ApiError as problem:
            if problem.is_stale or problem.is_transient:
                return False
            raise
        return True

    async def _renew_reread(self) -> None:
        """Read the lease after a conflict, and renew it if it is still ours.

        Somebody edited it, or an earlier renewal was applied and its response lost. In the second case
        little time may be left, so this renewal does not wait for the next interval.
        """
        try:
            await self._reread()
            await self._put(self._clock.monotonic(), self._lease)
        except ApiError:
            return  # the deadline decides

    async def _reread(self) -> None:
        """Read the lease after a conflict.

        Raises:
            ApiError: it cannot be read.
            LeaseLost: another process holds it.
        """
        found = await self._client.read(LEASE, self._terms.namespace, self._terms.name)
        held = _held(found)
        if found is not None and (held is None or held.holder == self._terms.identity):
            self._lease = found
            return
        self._renewed = None
        holder = held.holder if held and held.holder else "no process"
        raise LeaseLost(f"lease {self._terms.namespace}/{self._terms.name} is now held by {holder}")

    async def _put(self, sent: float, lease: Mapping[str, Any]) -> None:
        self._lease = await self._send(
            "PUT", self._terms.name, self._body(lease, self._terms.identity)
        )
        self._renewed = sent

    async def _send(self, method: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._on_write()
        return await self._client.request(
            method,
            LEASE.path(self._terms.namespace, name),
            body=body,
            timeout_s=SEND_TIMEOUT_S,
        )

    def _body(self, lease: Mapping[str, Any], holder: str) -> dict[str, Any]:
        """Return the Lease to write; everything that others wrote in it stays."""
        meta = {
            **(lease.get("metadata") or {}),
            "name": self._terms.name,
            "namespace": self._terms.namespace,
        }
        meta.pop("managedFields", None)
        spec = dict(lease.get("spec") or {})
        moment = datetime.fromtimestamp(self._clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != holder:
            spec["acquireTime"] = moment
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + bool(holder)
            if holder:
                epoch = max(_epoch(lease) + 1, int(self._clock.now()))
                meta["annotations"] = {
                    **(meta.get("annotations") or {}),
                    ANNOTATION_EPOCH: str(epoch),
                }
        spec |= {
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(self._terms.duration_s),
            "renewTime": moment,
        }
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": meta,
            "spec": spec,
        }


def _epoch(lease: Mapping[str, Any]) -> int:
    """Return the epoch in a Lease; 0 if there is none, or if it is not a valid number."""
    annotations = (lease.get("metadata") or {}).get("annotations") or {}
    text = str(annotations.get(ANNOTATION_EPOCH, ""))
    return int(text) if text.isdecimal() and len(text) <= EPOCH_DIGITS else 0


def _held(lease: Mapping[str, Any] | None) -> _Held | None:
    if lease is None:
        return None
    spec = lease.get("spec") or {}
    duration = spec.get("leaseDurationSeconds")
    return _Held(
        holder=str(spec.get("holderIdentity") or ""),
        renewed=str(spec.get("renewTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
        duration_s=float(duration) if isinstance(duration, int) else 0.0,
    )
