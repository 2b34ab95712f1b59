"""Requests for live limits: the body of PUT /v1/limits, and which of two requests wins. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.spec import Batching

MAX_LEASE_S = 600
MAX_GENERATION = 2**63 - 1

Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=True
    )


class RatiosByTier(_Strict):
    """A ratio for each tier; an absent ratio keeps the value without a lease."""

    realtime: Ratio | None = None
    standard: Ratio | None = None
    batch: Ratio | None = None

    def filled(self, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return the ratios by tier in the order of shared memory, with defaults."""
        given = tuple(getattr(self, tier.label) for tier in Tier)
        return tuple(
            default[index] if ratio is None else float(ratio) for index, ratio in enumerate(given)
        )


class LimitsRequest(_Strict):
    """The body of PUT /v1/limits."""

    sequences: int
    tokens: int
    admit: RatiosByTier = RatiosByTier()
    """Share of arrivals that is admitted."""
    shares: RatiosByTier = RatiosByTier()
    """Share of the sequences that a tier may hold while others wait."""
    lease_seconds: int = Field(ge=1, le=MAX_LEASE_S)
    generation: int = Field(ge=1, le=MAX_GENERATION)


class RefusedLimitsRequestError(Exception):
    """A refused request: 422 with the allowed ranges, or 409 if it is outdated."""

    def __init__(self, status: int, message: str, detail: dict[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class LimitsLease:
    """The limits lease in force."""

    request: LimitsRequest | None = None
    epoch: int = 0
    deadline: float = 0.0
    """Monotonic seconds."""

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the lease ends; 0 without a lease."""
        return max(0.0, self.deadline - now)


def allowed_ranges(batching: Batching, ceilings: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the ranges of a request's fields; the ceilings are the engine's own once it runs."""
    max_sequences, max_tokens = ceilings or (batching.max_sequences, batching.max_tokens)
    return {
        "sequences": {"min": min(batching.min_sequences, max_sequences), "max": max_sequences},
        "tokens": {"min": min(batching.min_tokens, max_tokens), "max": max_tokens},
        "leaseSeconds": {"min": 1, "max": MAX_LEASE_S},
        "admit": {"min": 0.0, "max": 1.0},
        "shares": {"min": 0.0, "max": 1.0},
    }


def parse_limits_request(body: bytes, ranges: dict[str, Any]) -> LimitsRequest:
    """Return the request in a body.

    Raises:
        RefusedLimitsRequestError: 422, naming every wrong field and the allowed ranges.
    """
    try:
        request = LimitsRequest.model_validate_json(body)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        )
        raise RefusedLimitsRequestError(422, wrong[:1000], {"allowed": ranges}) from None
    for name in ("sequences", "tokens"):
        value, allowed = getattr(request, name), ranges[name]
        if not allowed["min"] <= value <= allowed["max"]:
            raise RefusedLimitsRequestError(
                422,
                f"{name}: {value} is outside {allowed['min']}..{allowed['max']}",
                {"allowed": ranges},
            )
    return request


def decide_lease(
    current: LimitsLease, request: LimitsRequest, epoch: int, now: float
) -> LimitsLease:
    """Return the lease after a new request.

    A newer leader (epoch) may restart its generations. The same generation renews the lease if its
    contents are the same.

    Raises:
        RefusedLimitsRequestError: 409 for an older generation, or for the same one with other contents.
    """
    leased = current.request
    if leased is not None and epoch <= current.epoch:
        same = request.model_copy(update={"lease_seconds": leased.lease_seconds}) == leased
        if request.generation < leased.generation or (
            request.generation == leased.generation and not same
        ):
            raise RefusedLimitsRequestError(
                409,
                f"generation {request.generation} is not newer than {leased.generation}",
                {"generation": leased.generation, "epoch": current.epoch},
            )
    return LimitsLease(request, epoch, now + request.lease_seconds)
