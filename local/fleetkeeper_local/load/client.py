"""An example of a good client: pooled connections, deadlines, patient retries."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from fleetkeeper_contract.headers import REQUEST_ID_HEADER, TIER_HEADER
from fleetkeeper_local.load.schedule import Arrival

RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
"""As in OpenAI's clients: no token was sent yet, so no work is repeated."""
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request, over all its attempts.

    `cause` is empty if it succeeded; else `http_<status>`, `timeout`, `connection` or `truncated`
    (the stream ended without its closing frame). Times are in seconds of the event loop's clock.
    """

    ok: bool
    cause: str
    status: int
    attempts: int
    started_s: float
    first_token_s: float | None
    ended_s: float
    tokens: int
    detail: str = ""

    @property
    def time_per_token_s(self) -> float | None:
        """Return the mean time per token after the first; None without a second token or its time."""
        if self.first_token_s is None or self.tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds on how long and how often a client tries.

    The wait before attempt n is drawn uniformly from 0 to base x 2^n (full jitter), at most
    `max_wait_s`. A server's Retry-After is honored, plus up to a quarter, so that clients with
    the same value do not return together; it is capped at `max_wait_s`. No attempt starts later
    than `deadline_s` after the first.
    """

    attempts: int = 5
    base_wait_s: float = 0.25
    max_wait_s: float = 10.0
    request_timeout_s: float = 120.0
    connect_timeout_s: float = 5.0
    deadline_s: float = 300.0

    def wait_s(self, attempt: int, retry_after_s: float | None, rng: random.Random) -> float:
        """Return the seconds to wait after failed attempt number `attempt` (from 0)."""
        # Beyond 2^16 the bound is `max_wait_s` for any sensible base.
        most = min(self.max_wait_s, self.base_wait_s * 2.0 ** min(attempt, 16))
        drawn = rng.uniform(0.0, most)
        if retry_after_s is None:
            return drawn
        requested_s = min(retry_after_s, self.max_wait_s)
        return max(drawn, requested_s * rng.uniform(1.0, 1.25))


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a numeric Retry-After header; None if absent or not a number."""
    try:
        seconds = float(value) if value is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and 0 <= seconds < float("inf") else None


class RequestFailedError(Exception):
    """A failed attempt; `cause` as in Outcome."""

    def __init__(
        self, cause: str, status: int = 0, retry_after_s: float | None = None, detail: str = ""
    ) -> None:
        super().__init__(f"{cause} {detail}".strip())
        self.cause = cause
        self.status = status
        self.retry_after_s = retry_after_s
        self.detail = detail

    @property
    def can_be_retried(self) -> bool:
        """True if another attempt makes sense: refused or unreachable, not a partial response."""
        return self.status in RETRIED_STATUSES or self.cause == "connection"


class CompletionClient:
    """A client that streams completions from `base_url` (ends in /v1) over one connection pool."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        patience: Patience | None = None,
        connections: int = 512,
        seed: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/completions"
        self._model = model
        self._patience = patience or Patience()
        self._connections = connections
        self._rng = random.Random(seed)  # noqa: S311 - jitter, not secrecy
        self._sleep = sleep
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(
                total=self._patience.request_timeout_s,
                sock_connect=self._patience.connect_timeout_s,
            ),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the pool and abort the requests in flight."""
        if self._session is not None:
            await self._session.close()

    async def send(self, arrival: Arrival) -> Outcome:
        """Send a planned request now, streamed."""
        return await self.complete(
            arrival.prompt,
            arrival.output_tokens,
            tier=arrival.tier or None,
            session=arrival.session,
        )

    async def send_whole(self, arrival: Arrival) -> Outcome:
        """Send a planned request now; its response is not streamed."""
        return await self.complete(
            arrival.prompt, arrival.output_tokens, tier=arrival.tier or None, stream=False
        )

    async def complete(
        self,
        prompt: str | list[int],
        max_tokens: int,
        *,
        tier: str | None = None,
        session: str | None = None,
        stream: bool = True,
    ) -> Outcome:
        """Send one request, with the retries that its patience allows; never raise if it fails.

        Args:
            prompt: text or token ids.
            max_tokens: exactly this many tokens are generated.
            tier: the header X-Inference-Tier.
            session: the header X-Session-ID.
            stream: token by token; otherwise the response is not streamed and has no first-token
                time.
        """
        loop = asyncio.get_running_loop()
        headers = {REQUEST_ID_HEADER: uuid.uuid4().hex}
        if tier is not None:
            headers[TIER_HEADER] = tier
        if session is not None:
            headers["X-Session-ID"] = session
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        started_s = loop.time()
        last = RequestFailedError("none")
        for attempt in range(self._patience.attempts):
            try:
                first_s, tokens = await self._stream(body, headers)
            except RequestFailedError as failure:
                last = failure
                if not failure.can_be_retried or attempt + 1 == self._patience.attempts:
                    break
                wait_s = self._patience.wait_s(attempt, failure.retry_after_s, self._rng)
                if loop.time() + wait_s - started_s > self._patience.deadline_s:
                    break
                await self._sleep(wait_s)
            else:
                return Outcome(True, "", 200, attempt + 1, started_s, first_s, loop.time(), tokens)
        return Outcome(
            False,
            last.cause,
            last.status,
            attempt + 1,
            started_s,
            None,
            loop.time(),
            0,
            last.detail,
        )

    async def _stream(
        self, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[float | None, int]:
        """Make one attempt; return the time of the first token and the number of tokens.

        Raises:
            RequestFailedError: refused, unreachable, late, or ended before its closing frame.
        """
        if self._session is None:
            raise RuntimeError("CompletionClient must be used inside `async with`")
        try:
            async with self._session.post(self._url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    raise RequestFailedError(
                        f"http_{answer.status}",
                        answer.status,
                        parse_retry_after(answer.headers.get("Retry-After")),
                        (await answer.text())[:300],
                    )
                return await (self._read(answer) if body["stream"] else self._read_whole(answer))
        except TimeoutError as error:
            raise RequestFailedError("timeout", detail=str(error)) from error
        except aiohttp.ClientPayloadError as error:
            raise RequestFailedError("truncated", detail=str(error)) from error
        except aiohttp.ClientError as error:
            raise RequestFailedError("connection", detail=str(error)) from error

    @staticmethod
    async def _read_whole(answer: aiohttp.ClientResponse) -> tuple[float | None, int]:
        """Read a response that is not streamed."""
        return None, int((await answer.json())["usage"]["completion_tokens"])

    @staticmethod
    async def _read(answer: aiohttp.ClientResponse) -> tuple[float | None, int]:
        """Read server-sent events up to the closing frame."""
        loop = asyncio.get_running_loop()
        first_s: float | None = None
        tokens = 0
        async for line in answer.content:
            text = line.decode().strip()
            if not text.startswith("data:"):
                continue
            data = text.removeprefix("data:").strip()
            if data == DONE:
                return first_s, tokens
            frame = json.loads(data)
            if frame.get("error"):
                raise RequestFailedError("truncated", detail=str(frame["error"])[:300])
            if frame.get("choices") and first_s is None:
                first_s = loop.time()
            usage = frame.get("usage")
            if usage:
                tokens = int(usage["completion_tokens"])
        raise RequestFailedError("truncated", detail="the stream ended without its closing frame")
