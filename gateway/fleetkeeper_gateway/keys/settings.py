"""Settings of the keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fleetkeeper_contract.client_key_entries import parse_limit
from fleetkeeper_gateway.kubernetes.settings import KubernetesSettings


def _checked_limit(text: str) -> str:
    if text:
        parse_limit("it", text)
    return text


LimitText = Annotated[str, AfterValidator(_checked_limit)]
"""A limit for each tier: `100`, or `realtime=20,standard=100`. Empty: no limit."""


class KeysSettings(KubernetesSettings):
    """Settings of the watch of keys, and of the anonymous mode."""

    keys_namespace: str = Field(
        "fleetkeeper-keys",
        min_length=1,
        description="Namespace of the Secrets of client keys. It holds nothing else.",
    )
    keys_stale_seconds: float = Field(
        3600.0,
        ge=120,
        description="Time for which known keys are accepted after the last contact with the API server. Then every request is refused with 503. At least 120: without changes the API server is heard once a minute.",
    )
    anonymous: bool = Field(
        False,
        description="Whether requests need no key. All clients share one set of limits and see every service. Only for closed networks.",
    )
    anonymous_highest_tier: Literal["realtime", "standard", "batch"] = Field(
        "standard", description="Highest tier of anonymous requests."
    )
    anonymous_requests_per_minute: LimitText = Field(
        "", description="Limit of anonymous requests: `100`, or `standard=100,batch=20`."
    )
    anonymous_tokens_per_minute: LimitText = Field(
        "", description="Limit of tokens of anonymous requests a minute, in the same form."
    )
    anonymous_concurrency: LimitText = Field(
        "", description="Limit of anonymous requests in progress, in the same form."
    )
