"""The connections to services."""

from __future__ import annotations

from typing import Final

import aiohttp

from fleetkeeper_gateway.upstream.flood import BoundedConnector

KEEP_ALIVE_S: Final = 3.0
"""Idle time after which a connection is closed, shorter than the 5 s of vLLM's server. If vLLM closed first,
a request on its way would fail, and might have been received or not."""
READ_BYTES: Final = 65_536
"""Buffered bytes of a response at which the gateway stops reading the service, because its client is slow."""
_MAX_LINE_BYTES = 32_768


def create_session(connect_timeout_s: float) -> aiohttp.ClientSession:
    """Return the one session of the process. Call it on the event loop.

    It has no bound on connections: the limits of keys are the bound on requests.
    """
    return aiohttp.ClientSession(
        connector=BoundedConnector(
            limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=10
        ),
        timeout=aiohttp.ClientTimeout(
            total=None, connect=connect_timeout_s, sock_connect=connect_timeout_s, sock_read=None
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=READ_BYTES,
        max_line_size=_MAX_LINE_BYTES,
        max_field_size=_MAX_LINE_BYTES,
        trust_env=False,
    )
