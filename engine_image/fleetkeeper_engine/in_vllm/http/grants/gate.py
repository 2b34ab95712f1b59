"""The gate of an engine: what grants.json says now, and whether a request may pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fleetkeeper_contract.grants import GRANT_BAGGAGE_KEY
from fleetkeeper_engine.grants_file import NO_GRANTS, GrantsFile, parse_grants
from fleetkeeper_engine.in_vllm.http.asgi import Headers, Scope, without_headers
from fleetkeeper_engine.in_vllm.http.grants.identity import SCOPE_KEY, GrantIdentity
from fleetkeeper_engine.in_vllm.http.grants.refusals import GrantRefusedError
from fleetkeeper_engine.in_vllm.http.grants.used import Claim, UsedGrants
from fleetkeeper_engine.shm.layout import GrantRefusal

if TYPE_CHECKING:
    from fleetkeeper_engine.in_vllm.http.grants.signatures import GrantVerifier

logger = logging.getLogger("vllm.fleetkeeper")

CHECK_PERIOD_S = 1.0
"""Period of the check for a changed file. A check without a change is one stat call."""
wall_clock = time.time
_BAGGAGE = GRANT_BAGGAGE_KEY.encode()
UNREAD = GrantsFile()
"""The state before the file was first read."""
CLOSED = GrantsFile(demanded=True)
_CLAIM_KEY = "fleetkeeper.grant_claim"


class GrantsFullError(Exception):
    """The replay cache is full."""


class GrantGate:
    """Demands grants as the file states. If the file cannot be read, the last state remains valid."""

    def __init__(
        self,
        file: str,
        api_key: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = Path(file) if file else None
        self._authorization: Headers = (
            [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        )
        self._monotonic = monotonic
        self._state = UNREAD
        self._verifier: GrantVerifier | None = None
        self._used = UsedGrants()
        self._version: object = UNREAD
        self._problem = ""
        self._check_due = float("-inf")
        self.refused = [0] * len(GrantRefusal)
        """Requests refused since the start, by `GrantRefusal`."""
        self.refresh()

    @property
    def demanded(self) -> bool:
        """Return whether a request needs a grant."""
        return self._state.demanded

    def refresh(self) -> bool:
        """Read the file if it has changed, at most once a second. Return whether the demand changed."""
        if self._file is None or self._monotonic() < self._check_due:
            return False
        self._check_due = self._monotonic() + CHECK_PERIOD_S
        before = self._state.demanded
        try:
            version = _version_of(self._file)
            if version == self._version:
                return False
            text = self._file.read_text() if version else None
            # What could not be read is tried again. What is wrong waits for another version.
            self._version = version
            self._apply(NO_GRANTS if text is None else parse_grants(text))
        except (OSError, ValueError) as error:
            self._keep(self._file, error)
        return self._state.demanded != before

    def _keep(self, file: Path, error: Exception) -> None:
        if self._state is UNREAD:
            # The file exists, so there is a gateway. All requests are refused until the file is valid.
            self._state = CLOSED
        problem = f"{file} is invalid, grants demanded={self._state.demanded} as before: {error}"
        if problem != self._problem:
            logger.warning("%s", problem)
        self._problem = problem

    def _apply(self, state: GrantsFile) -> None:
        self._problem = ""
        if state == self._state:
            self._state = state
            return
        self._state, self._verifier = state, _verifier_of(state)
        logger.info(
            "grants demanded=%s service=%s keys=%s",
            state.demanded,
            state.service,
            ",".join(state.keys or ()),
        )

    def admit(self, scope: Scope, purpose: str = "") -> Scope | None:
        """Return the scope of a request that came with a valid grant, None if it needs none and has none.

        The scope holds the `GrantIdentity`, and vLLM's API key if there is one. `use` or `release`
        must follow. A grant is accepted once for each purpose.

        Raises:
            GrantRefusedError: if a grant is demanded and the request has no valid one.
            GrantsFullError: if its grant cannot be remembered.
        """
        if self._verifier is None and not self._state.demanded:
            return None
        try:
            identity, claim = self._claimed(scope, purpose)
        except (GrantRefusedError, GrantsFullError) as refusal:
            if not self._state.demanded:
                return None
            if isinstance(refusal, GrantRefusedError):
                self.refused[refusal.reason] += 1
            raise
        granted = without_headers(scope, (b"authorization",), self._authorization)
        granted[SCOPE_KEY] = identity
        granted[_CLAIM_KEY] = claim
        return granted

    def _claimed(self, scope: Scope, purpose: str) -> tuple[GrantIdentity, Claim]:
        grant = grant_in(scope)
        if grant is None:
            raise GrantRefusedError(GrantRefusal.MISSING)
        if self._verifier is None:
            raise GrantRefusedError(
                GrantRefusal.INVALID, "This service knows no keys of a gateway."
            )
        now = wall_clock()
        identity = self._verifier.verify(grant, now)
        if self._used.is_full(now):
            raise GrantsFullError
        claim = self._used.claim(identity, purpose)
        if claim is None:
            raise GrantRefusedError(GrantRefusal.USED)
        return identity, claim


def _verifier_of(state: GrantsFile) -> GrantVerifier | None:
    """Return the check of grants; None without keys, and in an image that cannot check signatures."""
    if not state.keys:
        return None
    try:
        # Imported here: an engine without a gateway loads no library for signatures.
        from fleetkeeper_engine.in_vllm.http.grants.signatures import GrantVerifier  # noqa: PLC0415
    except ImportError:
        logger.exception("grants cannot be checked: vLLM's environment needs pyjwt[crypto]")
        return None
    return GrantVerifier(state.service, state.keys)


def use(scope: Scope) -> None:
    """Count the request's grant as used. Requests without one are unaffected."""
    claim = scope.get(_CLAIM_KEY)
    if claim is not None:
        claim.use()


def release(scope: Scope) -> None:
    """Make the request's grant usable again, unless it was used."""
    claim = scope.get(_CLAIM_KEY)
    if claim is not None:
        claim.release()


def grant_in(scope: Scope) -> str | None:
    """Return the grant of a request: from the baggage, which routers pass on, or else the bearer token."""
    bearer = None
    for name, value in scope.get("headers") or ():
        if name == b"baggage":
            grant = _baggage_entry(value)
            if grant is not None:
                return grant
        elif name == b"authorization" and bearer is None:
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token:
                bearer = str(token, "latin-1")
    return bearer


def _baggage_entry(value: bytes) -> str | None:
    for entry in value.split(b","):
        key, _, rest = entry.partition(b"=")
        if key.strip() == _BAGGAGE:
            return str(rest.partition(b";")[0].strip(), "latin-1")
    return None


def _version_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    # The kubelet replaces the directory behind a link, so the file's number changes too.
    return found.st_ino, found.st_mtime_ns, found.st_size
