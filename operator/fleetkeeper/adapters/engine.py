"""Talks to the engines' control ports: signed orders for live limits, and metrics read directly.

Only pods that the caller names are called, by IP and fixed port, never by a URL that came from a
resource; no redirects, no proxies of the environment, 2 s and 4 MiB a call, 16 calls at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import aiohttp
import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from prometheus_client.parser import text_string_to_metric_families

from fleetkeeper.plan.control.edges import Edges
from fleetkeeper.plan.control.exposed import SERIES, sample_of
from fleetkeeper.plan.control.samples import PodSample, Source
from fleetkeeper.plan.control.values import PodOrder, PodView, PutOutcome

CONTROL_PORT: Final = 9090
TIMEOUT_S: Final = 2.0
RESPONSE_BYTES: Final = 4 * 1024 * 1024
IN_FLIGHT: Final = 16
TOKEN_LIFE_S: Final = 60
ISSUER: Final = "fleetkeeper"


class EngineError(Exception):
    """An engine did not give a usable answer; the message says what was wrong."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs orders. `epoch` rises with each leader: an engine refuses an older one."""

    key: Ed25519PrivateKey
    kid: str
    epoch: int
    issuer: str = ISSUER

    def token(self, audience: str, now: float) -> str:
        """A bearer token for one pod (by UID), for one use, at most 60 s."""
        claims = {
            "iss": self.issuer,
            "aud": audience,
            "iat": int(now),
            "exp": int(now) + TOKEN_LIFE_S,
            "jti": secrets.token_urlsafe(16),
            "epoch": self.epoch,
        }
        return jwt.encode(claims, self.key, algorithm="EdDSA", headers={"kid": self.kid})


def read_signing_key(pem: bytes) -> Ed25519PrivateKey:
    """The private key that signs orders.

    Raises:
        ValueError: when it is no Ed25519 key in PEM without a password.
    """
    key = load_pem_private_key(pem, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise TypeError("the control key must be an Ed25519 private key")
    return key


def order_body(order: PodOrder) -> dict[str, Any]:
    """The body of PUT /v1/limits."""
    return {
        "sequences": order.limits.sequences,
        "tokens": order.limits.tokens,
        "admit": order.admission.admit_by_tier(),
        "shares": order.admission.shares_by_tier(),
        "leaseSeconds": int(order.lease_s),
        "generation": order.generation,
    }


def address_of(ip: str, path: str, port: int) -> str:
    """The URL of a pod's control port.

    Raises:
        EngineError: when `ip` is not an IP address.
    """
    try:
        address = ip_address(ip)
    except ValueError as error:
        raise EngineError(f"{ip!r} is not an IP address") from error
    return (
        f"http://[{address}]:{port}{path}"
        if address.version == 6
        else f"http://{address}:{port}{path}"
    )


class Engines:
    """The engines' control ports."""

    def __init__(self, clock: Callable[[], float], *, port: int = CONTROL_PORT) -> None:
        """`clock` gives seconds since the epoch; `port` differs only in tests."""
        self._clock = clock
        self._port = port
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._session = aiohttp.ClientSession(
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=IN_FLIGHT, ttl_dns_cache=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()

    async def put_limits(
        self, orders: Sequence[PodOrder], signer: Signer, may_send: Callable[[], bool]
    ) -> tuple[PutOutcome, ...]:
        """Sends orders, 16 at a time; every order has an outcome, none raises.

        `may_send` is asked just before each is sent: a leader that lost its lease sends nothing more.
        """
        return tuple(
            await asyncio.gather(*(self._put(order, signer, may_send) for order in orders))
        )

    async def _put(
        self, order: PodOrder, signer: Signer, may_send: Callable[[], bool]
    ) -> PutOutcome:
        async with self._slots:
            if not may_send():
                return PutOutcome(order.pod, order.generation, False, detail="not the leader")
            headers = {"Authorization": f"Bearer {signer.token(order.uid, self._clock())}"}
            try:
                status, body = await self._call(
                    "PUT", order.ip, "/v1/limits", headers=headers, json=order_body(order)
                )
                answer = _object(body)
            except EngineError as error:
                return PutOutcome(order.pod, order.generation, False, detail=str(error))
        if status == 200:
            return PutOutcome(order.pod, order.generation, True)
        detail = f"answered {status}: {str(answer.get('error', ''))[:200]}"
        return PutOutcome(order.pod, order.generation, False, _newest(status, answer), detail)

    async def get_limits(self, pod: PodView, signer: Signer) -> dict[str, Any]:
        """What a pod says of its limits.

        Raises:
            EngineError: when it gives no usable answer.
        """
        headers = {"Authorization": f"Bearer {signer.token(pod.uid, self._clock())}"}
        async with self._slots:
            status, body = await self._call("GET", pod.ip, "/v1/limits", headers=headers)
        if status != 200:
            raise EngineError(f"{pod.name} answered {status}")
        return _object(body)

    async def scrape_samples(
        self, pods: Iterable[tuple[PodView, Edges]], *, deadline_s: float = TIMEOUT_S
    ) -> tuple[PodSample | None, ...]:
        """A sample of each pod, read directly, in their order; None of those that give no usable one.

        Pods are called in that order too. Those to which `deadline_s` left no time are missing at the
        end of the answer.
        """
        called: list[str] = []
        jobs = [asyncio.create_task(self._scrape(pod, edges, called)) for pod, edges in pods]
        if not jobs:
            return ()
        try:
            await asyncio.wait(jobs, timeout=deadline_s)
        finally:
            late = [job for job in jobs if not job.done()]
            for job in late:
                job.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return tuple(None if job.cancelled() else job.result() for job in jobs[: len(called)])

    async def _scrape(self, pod: PodView, edges: Edges, called: list[str]) -> PodSample | None:
        async with self._slots:
            called.append(pod.name)
            try:
                status, body = await self._call("GET", pod.ip, "/metrics")
            except EngineError:
                return None
            now = self._clock()
        if status != 200:
            return None
        return await asyncio.to_thread(parse_sample, pod.name, now, body, edges)

    async def _call(
        self,
        method: str,
        ip: str,
        path: str,
        **kwargs: Any,  # noqa: ANN401 - aiohttp's own keywords
    ) -> tuple[int, bytes]:
        url = address_of(ip, path, self._port)
        try:
            async with self._session.request(
                method, url, allow_redirects=False, **kwargs
            ) as response:
                body = b""
                async for chunk in response.content.iter_chunked(65_536):
                    body += chunk
                    if len(body) > RESPONSE_BYTES:
                        raise EngineError(f"{ip}: the answer is larger than {RESPONSE_BYTES} bytes")
                return response.status, body
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(f"{ip}: {type(error).__name__} {str(error)[:200]}") from error


def _object(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineError("the answer is no JSON") from error
    if not isinstance(answer, dict):
        raise EngineError("the answer is no JSON object")
    return answer


def _newest(status: int, answer: Mapping[str, Any]) -> int:
    """The generation that a 409 names; 0 for anything else, or when it is out of range."""
    generation = answer.get("generation")
    if status != 409 or not isinstance(generation, int) or isinstance(generation, bool):
        return 0
    return generation if 0 < generation < 2**53 else 0


def _wanted_lines(text: str) -> Iterator[str]:
    """The lines of series that decisions need: an engine exposes thousands more."""
    for line in text.splitlines():
        if line.startswith("fleetkeeper_"):
            end = len(line)
            for mark in "{ ":
                found = line.find(mark)
                end = found if 0 < found < end else end
            if line[:end] in SERIES:
                yield line


def parse_sample(pod: str, now: float, body: bytes, edges: Edges) -> PodSample | None:
    """The sample in a scrape's text, None when it is no such text. NaN and the like are judged later."""
    try:
        text = "\n".join(_wanted_lines(body.decode("utf-8"))) + "\n"
        series = [
            (row.name, row.labels, float(row.value))
            for family in text_string_to_metric_families(text)
            for row in family.samples
        ]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
    if not series or not math.isfinite(now):
        return None
    return sample_of(pod, now, series, edges, Source.DIRECT)
