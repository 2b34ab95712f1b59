"""Client of the engines' control ports: signed limits requests, and direct reads of metrics.

Only pods that the caller names are called, by IP and fixed port, never by a URL from a resource. There
are no redirects, no proxies from the environment and no compression; a call takes at most 2 s. Limits
requests and reads have separate connections and slots: a pod that does not answer reads delays no
limits request, and the reverse.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final

import aiohttp
import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fleetkeeper.adapters.exposition import ContractLines, parse_text
from fleetkeeper.adapters.keys import public_jwk
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.autoscale.signals.samples import PodSample
from fleetkeeper.autoscale.types import LimitsRequest, PodView, PutOutcome

CONTROL_PORT: Final = 9090
TIMEOUT_S: Final = 2.0
METRICS_BYTES: Final = 4 * 1024 * 1024
"""Limit of a metrics response; lines outside the contract are dropped while it arrives."""
ANSWER_BYTES: Final = 64 * 1024
"""Limit of the response to a limits request, which is parsed whole."""
CHUNK_BYTES: Final = 65_536
LIMITS_IN_FLIGHT: Final = 64
READS_IN_FLIGHT: Final = 64
"""Up to this many pods may start to hang at once without delaying others. From the next tick on, they
use the slots of `DOUBTED_READS`."""
DOUBTED_READS: Final = 32
"""Concurrent reads of pods that gave no usable answer the last time."""
DOUBTED_S: Final = 0.5
"""Maximum time that the result waits for those. A pod that works again answers in milliseconds."""
TOKEN_LIFE_S: Final = 60
ISSUER: Final = "fleetkeeper"


class EngineError(Exception):
    """The lack of a usable answer from an engine; the message says what was wrong."""


class Signer:
    """A signer of limits requests.

    `epoch` rises with each leader; engines refuse an older one. `may_sign` is called just before each
    request, so that a leader that lost its lease sends no more.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        *,
        epoch: Callable[[], int],
        may_sign: Callable[[], bool],
    ) -> None:
        self._key = key
        self._kid = public_jwk(key.public_key())["kid"]
        self._epoch = epoch
        self.may_sign = may_sign

    def token(self, audience: str, now: float) -> str:
        """Return a bearer token for one pod (by UID), for one use, valid for at most 60 s."""
        claims = {
            "iss": ISSUER,
            "aud": audience,
            "iat": int(now),
            "exp": int(now) + TOKEN_LIFE_S,
            "jti": secrets.token_urlsafe(16),
            "epoch": self._epoch(),
        }
        return jwt.encode(claims, self._key, algorithm="EdDSA", headers={"kid": self._kid})


def read_signing_key(pem: bytes) -> Ed25519PrivateKey:
    """Return the private key that signs limits requests.

    Raises:
        TypeError: it is not an Ed25519 key, or has a password.
        ValueError: it is not a private key in PEM.
    """
    key = load_pem_private_key(pem, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise TypeError("the control key must be an Ed25519 private key")
    return key


def limits_body(request: LimitsRequest) -> dict[str, Any]:
    """Return the body of PUT /v1/limits."""
    return {
        "sequences": request.limits.sequences,
        "tokens": request.limits.tokens,
        "admit": request.admission.admit_by_tier(),
        "shares": request.admission.shares_by_tier(),
        "leaseSeconds": int(request.lease_s),
        "generation": request.generation,
    }


def address_of(ip: str, path: str, port: int) -> str:
    """Return the URL of a pod's control port.

    Raises:
        EngineError: `ip` is not an IP address.
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

    def __init__(
        self,
        clock: Callable[[], float],
        signer: Signer | None = None,
        *,
        port: int = CONTROL_PORT,
    ) -> None:
        """Use `clock` for seconds since the epoch; `port` differs only in tests.

        Without a signer no limits request is sent, and engines keep their start-up limits.
        """
        self._clock = clock
        self._signer = signer
        self._port = port
        self._limits_slots = asyncio.Semaphore(LIMITS_IN_FLIGHT)
        self._read_slots = asyncio.Semaphore(READS_IN_FLIGHT)
        self._doubted_slots = asyncio.Semaphore(DOUBTED_READS)
        self._limits_session = _session(LIMITS_IN_FLIGHT)
        self._reads = _session(READS_IN_FLIGHT + DOUBTED_READS)

    async def close(self) -> None:
        """Close all connections."""
        await self._limits_session.close()
        await self._reads.close()

    async def put_limits(self, requests: Sequence[LimitsRequest]) -> tuple[PutOutcome, ...]:
        """Send limits requests, 64 at a time; return an outcome for each, never raise."""
        return tuple(await asyncio.gather(*(self._put(request) for request in requests)))

    async def _put(self, request: LimitsRequest) -> PutOutcome:
        async with self._limits_slots:
            if self._signer is None or not self._signer.may_sign():
                why = "no control key" if self._signer is None else "not the leader"
                return PutOutcome(request.pod, request.generation, False, detail=why)
            headers = {"Authorization": f"Bearer {self._signer.token(request.uid, self._clock())}"}
            body = bytearray()
            try:
                status = await self._call(
                    self._limits_session,
                    "PUT",
                    request.ip,
                    "/v1/limits",
                    take=body.extend,
                    limit=ANSWER_BYTES,
                    headers=headers,
                    json=limits_body(request),
                )
                answer = _object(bytes(body))
            except EngineError as error:
                return PutOutcome(request.pod, request.generation, False, detail=str(error))
        if status == 200:
            return PutOutcome(request.pod, request.generation, True)
        detail = f"answered {status}: {str(answer.get('error', ''))[:200]}"
        return PutOutcome(request.pod, request.generation, False, _newest(status, answer), detail)

    async def scrape_samples(
        self,
        pods: Iterable[tuple[PodView, Edges]],
        *,
        deadline_s: float = TIMEOUT_S,
        doubted: Collection[str] = (),
        on_defect: Callable[[str, Exception], None] | None = None,
    ) -> dict[str, PodSample | None]:
        """Return the sample of each called pod by pod UID; None if its answer is not usable.

        Pods are called in the order given; those for which `deadline_s` left no time are not in the
        result. Pods in `doubted` (UIDs) have separate slots: they may all hang, and the result waits
        for them no longer than `DOUBTED_S`. An unexpected error in reading one pod concerns that pod only:
        `on_defect` is called with its UID and the error. Without `on_defect` the error is raised.
        """
        found: dict[str, PodSample | None] = {}
        trusted: dict[asyncio.Task[None], str] = {}
        others: dict[asyncio.Task[None], str] = {}
        for pod, edges in pods:
            is_doubted = pod.uid in doubted
            slots = self._doubted_slots if is_doubted else self._read_slots
            job = asyncio.create_task(self._scrape(pod, edges, slots, found))
            (others if is_doubted else trusted)[job] = pod.uid
        began = asyncio.get_running_loop().time()
        try:
            if trusted:
                await asyncio.wait(trusted, timeout=deadline_s)
            if others:
                left_s = min(DOUBTED_S, deadline_s) - (asyncio.get_running_loop().time() - began)
                await asyncio.wait(others, timeout=max(0.0, left_s))
        finally:
            for job in (*trusted, *others):
                job.cancel()
            ends = await asyncio.gather(*trusted, *others, return_exceptions=True)
        for uid, end in zip((*trusted.values(), *others.values()), ends, strict=True):
            if isinstance(end, Exception):
                if on_defect is None:
                    raise end
                on_defect(uid, end)
        return found

    async def _scrape(
        self,
        pod: PodView,
        edges: Edges,
        slots: asyncio.Semaphore,
        found: dict[str, PodSample | None],
    ) -> None:
        async with slots:
            found[pod.uid] = None
            try:
                text = await self._metrics(pod.ip)
            except EngineError:
                return
            now = self._clock()
        found[pod.uid] = await asyncio.to_thread(parse_text, pod.name, now, text, edges)

    async def _metrics(self, ip: str) -> str:
        """Return the lines of known series that a pod exposes.

        Raises:
            EngineError: there is no usable answer.
        """
        lines = ContractLines()
        status = await self._call(
            self._reads, "GET", ip, "/metrics", take=lines.feed, limit=METRICS_BYTES
        )
        if status != 200:
            raise EngineError(f"{ip} answered {status}")
        try:
            return lines.text()
        except ValueError as error:
            raise EngineError(f"{ip}: {str(error)[:200]}") from error

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        ip: str,
        path: str,
        *,
        take: Callable[[bytes], None],
        limit: int,
        **kwargs: Any,  # noqa: ANN401 - aiohttp's own keywords
    ) -> int:
        """Pass the body to `take` as it arrives, and return the status."""
        url = address_of(ip, path, self._port)
        size = 0
        try:
            async with session.request(method, url, allow_redirects=False, **kwargs) as response:
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    size += len(chunk)
                    if size > limit:
                        raise EngineError(f"{ip}: the response is larger than {limit} bytes")
                    take(chunk)
                return response.status
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EngineError(f"{ip}: {type(error).__name__} {str(error)[:200]}") from error


def _session(connections: int) -> aiohttp.ClientSession:
    """Return a session that never decompresses: a few compressed bytes can become gigabytes."""
    return aiohttp.ClientSession(
        trust_env=False,
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=connections, ttl_dns_cache=0),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineError("the response is not JSON") from error
    if not isinstance(answer, dict):
        raise EngineError("the response is not a JSON object")
    return answer


def _newest(status: int, answer: Mapping[str, Any]) -> int:
    """Return the generation in a 409 response; 0 for anything else, or if it is out of range."""
    generation = answer.get("generation")
    if status != 409 or not isinstance(generation, int) or isinstance(generation, bool):
        return 0
    return generation if 0 < generation < 2**53 else 0
