"""Reads the ledgers of all engines, again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import aiohttp
import structlog
from pydantic import ValidationError

from fleetkeeper_contract.grants import USAGE_PATH
from fleetkeeper_gateway.grants.keys import NoGrantKeyError
from fleetkeeper_gateway.interfaces import Limiter
from fleetkeeper_gateway.tiers import TIERS
from fleetkeeper_gateway.usage import metrics
from fleetkeeper_gateway.usage.lines import Reading
from fleetkeeper_gateway.usage.pages import Entry, Page, Tokens
from fleetkeeper_gateway.usage.pods import Target
from fleetkeeper_gateway.usage.store import UsageStore

log = structlog.get_logger(__name__)

AT_ONCE: Final = 16
"""Engines that are asked at once."""
DEADLINE_S: Final = 10.0
"""For all pages of one engine. What is left comes the next time."""
PAGE_BYTES: Final = 4 * 1024 * 1024
LAST_PERIOD_S: Final = 0.5
"""Pods that terminate are asked this often: their ledger ends with them."""
TIDY_S: Final = 300.0
SETTLED_AT_ONCE: Final = 64
MAX_TO_SETTLE: Final = 50_000
"""Requests that wait to be settled. Beyond it, their reservations end by themselves."""
LAST_READS: Final = 1_200


class TokenSigner(Protocol):
    """Signs what the control port of one pod accepts."""

    def sign(self, pod_uid: str) -> str:
        """Return a token for one request."""


class Checker(Protocol):
    """Tells attempts of the gateway from those that an engine made up."""

    def is_ours(self, attempt: str, service: str, request: str, key: str, tier: str) -> bool:
        """Return whether the gateway sent this attempt of this request to this service."""


class UnreadableError(Exception):
    """An engine whose ledger cannot be read. The message says why."""


class Collector:
    """One reader of all engines. The limiter is None where nothing is to be settled."""

    def __init__(
        self,
        store: UsageStore,
        targets: Callable[[], Iterable[Target]],
        signer: TokenSigner,
        checker: Checker,
        limiter: Limiter | None,
        *,
        period_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._targets = targets
        self._signer = signer
        self._checker = checker
        self._limiter = limiter
        self._period_s = period_s
        self._wall = wall
        self._free = asyncio.Semaphore(AT_ONCE)
        self._busy: set[str] = set()
        self._problems: dict[str, str] = {}
        self._not_counting: set[str] = set()
        self._ending: set[str] = set()
        self._to_end: asyncio.Queue[Target] = asyncio.Queue()
        self._to_settle: asyncio.Queue[Entry] = asyncio.Queue(MAX_TO_SETTLE)
        self.last_read: float | None = None
        """Monotonic time at which all engines were last asked."""

    def pod_ends(self, target: Target) -> None:
        """Read a pod often from now on, until it does not answer any more."""
        if target.pod.uid not in self._ending:
            self._ending.add(target.pod.uid)
            self._to_end.put_nowait(target)

    async def run(self) -> None:
        """Read until cancelled."""
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._read_regularly(session))
            tasks.create_task(self._read_ending(session))
            tasks.create_task(self._tidy_regularly())
            tasks.create_task(self._settle_all())

    async def read_all(self, session: aiohttp.ClientSession) -> None:
        """Ask every engine once."""
        targets = list(self._targets())
        await asyncio.gather(*(self.read(session, target) for target in targets))
        await self._sync()
        known = {target.pod.uid for target in targets}
        self._problems = {uid: text for uid, text in self._problems.items() if uid in known}
        self._not_counting &= known
        metrics.PODS.set(len(targets))
        metrics.UNREACHABLE.set(len(self._problems))
        metrics.NOT_COUNTING.set(len(self._not_counting))
        self.last_read = time.monotonic()

    async def read(self, session: aiohttp.ClientSession, target: Target) -> bool:
        """Read an engine's ledger to its end. Return whether it answered."""
        uid = target.pod.uid
        if uid in self._busy:
            return True
        self._busy.add(uid)
        try:
            async with self._free, asyncio.timeout(DEADLINE_S):
                while await self._read_page(session, target):
                    continue
        except (UnreadableError, aiohttp.ClientError, OSError, NoGrantKeyError) as problem:
            # TimeoutError is an OSError.
            self._note_problem(target, problem)
            return False
        finally:
            self._busy.discard(uid)
        if self._problems.pop(uid, None) is not None:
            log.info("usage is read again", pod=target.name, namespace=target.pod.namespace)
        return True

    async def _read_page(self, session: aiohttp.ClientSession, target: Target) -> bool:
        """Read the next page. Return whether there is another."""
        cursor = self._store.cursor(target.pod.uid)
        page = parse_page(await self._get(session, target, cursor.boot, cursor.next))
        page = self._with_own_attempts(page, target)
        if not page.counting or page.errors:
            self._not_counting.add(target.pod.uid)
        try:
            reading = self._store.append(page, target.pod, self._wall())
        except OSError:
            metrics.WRITE_FAILURES.inc()
            raise
        _count(reading)
        self._hand_over(reading.attributed)
        return reading.cursor.next < page.newest and reading.cursor.next > cursor.next

    def _with_own_attempts(self, page: Page, target: Target) -> Page:
        """Return a page in which attempts that the gateway did not make are unattributed."""
        service = f"{target.pod.namespace}/{target.pod.service}"
        entries = tuple(
            entry if self._is_own(entry, service) else entry.without_grant()
            for entry in page.entries
        )
        claimed = sum(entry.attempt is not None for entry in page.entries)
        forged = claimed - sum(entry.attempt is not None for entry in entries)
        if not forged:
            return page
        metrics.FORGED.inc(forged)
        log.warning(
            "an engine tells of requests that the gateway did not send it",
            pod=target.name,
            namespace=target.pod.namespace,
            entries=forged,
        )
        return page.model_copy(update={"entries": entries})

    def _is_own(self, entry: Entry, service: str) -> bool:
        if entry.attempt is None or entry.key is None:
            return True
        return self._checker.is_ours(
            entry.attempt, service, entry.request or "", entry.key, entry.tier or ""
        )

    async def _get(
        self, session: aiohttp.ClientSession, target: Target, boot: str, after: int
    ) -> bytes:
        token = self._signer.sign(target.pod.uid)
        async with session.get(
            target.url + USAGE_PATH,
            params={"boot": boot, "after": str(after)},
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                raise UnreadableError(f"status {response.status}")
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > PAGE_BYTES:
                    raise UnreadableError(f"a page has more than {PAGE_BYTES} bytes")
            return bytes(content)

    def _hand_over(self, entries: Iterable[Entry]) -> None:
        """Let the tokens of entries be settled soon: a slow Redis must not slow the reading."""
        if self._limiter is None:
            return
        for entry in entries:
            try:
                self._to_settle.put_nowait(entry)
            except asyncio.QueueFull:
                metrics.SETTLE_FAILURES.inc()

    async def _settle_all(self) -> None:
        while True:
            entries = [await self._to_settle.get()]
            while not self._to_settle.empty() and len(entries) < SETTLED_AT_ONCE:
                entries.append(self._to_settle.get_nowait())
            await asyncio.gather(*map(self._settle, entries))

    async def _settle(self, entry: Entry) -> None:
        if (
            self._limiter is None
            or entry.key is None
            or entry.request is None
            or entry.tier is None
        ):
            return
        try:
            await self._limiter.settle(
                entry.key, TIERS[entry.tier], entry.request, entry.prompt + entry.answer
            )
        except Exception:
            # Whatever fails in the limits: the reservation ends by itself, and usage continues.
            metrics.SETTLE_FAILURES.inc()
            log.exception("tokens were not settled", request=entry.request)

    async def _read_regularly(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self.read_all(session)
            await asyncio.sleep(self._period_s)

    async def _read_ending(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._read_until_end(session, await self._to_end.get()))

    async def _read_until_end(self, session: aiohttp.ClientSession, target: Target) -> None:
        """Read a pod often. Each has a task: a dead one must not keep the others waiting."""
        for _ in range(LAST_READS):
            if not await self.read(session, target):
                break
            await asyncio.sleep(LAST_PERIOD_S)
        self._ending.discard(target.pod.uid)

    async def _tidy_regularly(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._store.tidy, self._wall())
            except OSError as problem:
                metrics.WRITE_FAILURES.inc()
                log.error("usage files were not tidied", error=str(problem))  # noqa: TRY400 - no defect
            await asyncio.sleep(TIDY_S)

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(self._store.sync)
        except OSError as problem:
            metrics.WRITE_FAILURES.inc()
            log.error("usage files were not synced", error=str(problem))  # noqa: TRY400 - no defect

    def _note_problem(self, target: Target, problem: Exception) -> None:
        """Log a problem once, not each time."""
        text = f"{type(problem).__name__}: {problem}"[:300]
        uid = target.pod.uid
        if self._problems.get(uid) != text and not target.terminating:
            log.warning(
                "usage cannot be read",
                pod=target.name,
                namespace=target.pod.namespace,
                error=text,
            )
        self._problems[uid] = text


def parse_page(content: bytes) -> Page:
    """Return a page.

    Raises:
        UnreadableError: if it is none.
    """
    try:
        return Page.model_validate_json(content)
    except ValidationError as problem:
        first = problem.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UnreadableError(f"not a page of usage: {place}: {first['msg']}") from None


def _count(reading: Reading) -> None:
    metrics.LOST_ENTRIES.inc(reading.lost_entries)
    metrics.ENTRIES.labels("true").inc(len(reading.attributed))
    metrics.ENTRIES.labels("false").inc(reading.unattributed_entries)
    for entry in reading.attributed:
        _count_tokens(entry, "true")
    _count_tokens(reading.unattributed, "false")
    for kind in ("prompt", "cached", "answer"):
        metrics.LOST_TOKENS.labels(kind).inc(getattr(reading.lost, kind))


def _count_tokens(tokens: Tokens, attributed: str) -> None:
    for kind in ("prompt", "cached", "answer"):
        metrics.TOKENS.labels(kind, attributed).inc(getattr(tokens, kind))
