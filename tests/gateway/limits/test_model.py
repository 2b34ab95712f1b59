"""The scripts against other tellings of the same rules, over random requests and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.interfaces import TierLimits
from fleetkeeper_gateway.limits.limiter import reading_of
from fleetkeeper_gateway.limits.local import LocalLimits, Running
from fleetkeeper_gateway.limits.names import names_of
from fleetkeeper_gateway.limits.rules import Reading, headers_of, refusal
from fleetkeeper_gateway.limits.scripts import ADMIT, RELEASE, SETTLE
from tests.support.gateway.limits_world import demand_of, key_with
from tests.support.services.lua_redis import LuaRedis

NAMES = names_of("team-a", "standard")
PLACE = ("team-a", "standard")
ORPHAN_MS = 600_000
WINDOW_S = 60
WINDOW_MS = WINDOW_S * 1000


class Scripts:
    """The scripts, called as the limiter calls them."""

    def __init__(self) -> None:
        self.redis = LuaRedis()

    def admit(self, request_id: str, limits: TierLimits, tokens: int) -> Reading:
        most = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency)
        given_ = (-1 if each is None else each for each in most)
        return reading_of(
            self.redis.run(
                ADMIT, NAMES.admit, request_id, *given_, tokens, WINDOW_S, 10**9, ORPHAN_MS
            )
        )

    def release(self, request_id: str, *, sent: bool) -> None:
        self.redis.run(RELEASE, NAMES.release, request_id, int(sent), ORPHAN_MS)

    def settle(self, request_id: str, tokens: int) -> None:
        self.redis.run(SETTLE, NAMES.settle, request_id, tokens, ORPHAN_MS)

    @property
    def level(self) -> float | None:
        found = self.redis._hget(NAMES.admit[2].decode(), "level")
        return None if found is None else float(found)


limits_ = st.builds(
    TierLimits,
    st.none() | st.integers(0, 6),
    st.none() | st.integers(0, 200),
    st.none() | st.integers(0, 3),
)
waits_ms = st.integers(0, 2000) | st.integers(0, 70_000)
steps = st.lists(
    st.tuples(waits_ms, st.sampled_from(["admit"] * 4 + ["sent", "unsent", "settle"]), st.integers(0, 250), st.integers(0, 9)),
    max_size=60,
)  # fmt: skip


@pytest.mark.promise("key-limits-settled")
@given(limits_, steps)
def test_local_limits_decide_as_the_scripts_do(
    limits: TierLimits, steps: list[tuple[int, str, int, int]]
) -> None:
    """The same requests at the same times are admitted and refused, with the same headers."""
    scripts, running = Scripts(), Running()
    local = LocalLimits(running, WINDOW_MS, clock=lambda: scripts.redis.now)
    live: list[str] = []
    settled: set[str] = set()
    for number, (wait_ms, action, tokens, which) in enumerate(steps):
        scripts.redis.now += wait_ms
        if action == "admit":
            name = f"request-{number}"
            found, expected = (
                scripts.admit(name, limits, tokens),
                local.admit(PLACE, name, limits, tokens),
            )
            assert found.admitted == expected.admitted
            assert found.running == expected.running
            assert headers_of(limits, found, WINDOW_MS) == headers_of(limits, expected, WINDOW_MS)
            if found.admitted:
                live.append(name)
                if limits.concurrency is not None:
                    running.add(PLACE, name)
        elif live and action == "settle":
            name = live[which % len(live)]
            if name in settled:
                continue  # in Redis it is charged again, as a request that no replica reserved
            settled.add(name)
            scripts.settle(name, tokens)
            local.settle(PLACE, name, tokens)
        elif live:
            name = live.pop(which % len(live))
            scripts.release(name, sent=action == "sent")
            running.remove(PLACE, name)
            local.release(PLACE, name, sent=action == "sent")


@given(limits_, steps)
def test_a_retry_after_retry_after_is_admitted(
    limits: TierLimits, steps: list[tuple[int, str, int, int]]
) -> None:
    """Unless the wait is a whole minute, the most that is told, or a request has to end first."""
    scripts = Scripts()
    for number, (wait_ms, _, tokens, _) in enumerate(steps):
        scripts.redis.now += wait_ms
        name = f"request-{number}"
        found = scripts.admit(name, limits, tokens)
        if found.admitted:
            scripts.release(name, sent=True)
            continue
        error = refusal(demand_of(key_with(), tokens), limits, found, WINDOW_MS)
        assert 1 <= error.retry_after_s <= 60
        if error.retry_after_s < 60 and error.limit != "concurrency":
            scripts.redis.now += error.retry_after_s * 1000
            assert scripts.admit(f"{name}-again", limits, tokens).admitted
            scripts.release(f"{name}-again", sent=True)


@dataclass
class Naive:
    """A bucket of tokens, in exact numbers, one event after another."""

    limit: int
    level: Fraction = Fraction(0)
    now: int = 0
    held: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    """Tokens, the time of their return, and whether the request has ended."""

    def __post_init__(self) -> None:
        self.level = Fraction(self.limit)

    def advance(self, now: int) -> None:
        self.change(Fraction((now - self.now) * self.limit, 60_000))
        self.now = now

    def change(self, tokens: Fraction | int) -> None:
        self.level = min(Fraction(self.limit), self.level + tokens)

    def admit(self, name: str, tokens: int) -> bool:
        returned = 0
        for other, (cost, due, ended) in list(self.held.items()):
            if due <= self.now:
                del self.held[other]
                returned += 0 if ended else cost
        self.change(returned)
        cost = min(tokens, self.limit)
        if self.level < cost:
            return False
        self.level -= cost
        self.held[name] = (cost, self.now + ORPHAN_MS, False)
        return True

    def release(self, name: str, *, sent: bool) -> None:
        if name in self.held and not self.held[name][2]:
            cost, due, _ = self.held.pop(name)
            if sent:
                self.held[name] = (cost, due, True)
            else:
                self.change(cost)

    def settle(self, name: str, tokens: int) -> None:
        cost, _, _ = self.held.pop(name, (0, 0, False))
        self.change(cost - tokens)


bucket_steps = st.lists(
    st.tuples(
        st.integers(0, 3000) | st.integers(0, 700_000),
        st.sampled_from(["admit"] * 3 + ["sent", "unsent", "settle", "settle"]),
        st.integers(0, 400),
        st.integers(0, 9),
    ),
    max_size=60,
)


# A limit of 60 a minute or a multiple: levels are then thousandths of tokens, far above the
# rounding that the script allows for.
@given(st.integers(1, 6).map(lambda number: number * 60), bucket_steps)
def test_the_bucket_does_as_a_naive_one_in_exact_numbers(
    limit: int, steps: list[tuple[int, str, int, int]]
) -> None:
    """Reservations, ends, settling twice, late or for unknown requests, debts and orphans."""
    scripts, naive = Scripts(), Naive(limit)
    naive.now = scripts.redis.now
    limits = TierLimits(tokens_per_minute=limit)
    names: list[str] = []
    for number, (wait_ms, action, tokens, which) in enumerate(steps):
        scripts.redis.now += wait_ms
        naive.advance(scripts.redis.now)
        if action == "admit":
            name = f"request-{number}"
            found = scripts.admit(name, limits, tokens)
            assert found.admitted == naive.admit(name, tokens)
            assert abs(Fraction(found.level) - naive.level) < Fraction(1, 10**6)
            if found.admitted:
                names.append(name)
        elif names and action == "settle":
            name = names[which % len(names)]
            scripts.settle(name, tokens)
            if scripts.level is not None:  # else the bucket was full for long, and is forgotten
                naive.settle(name, tokens)
        elif names:
            name = names[which % len(names)]
            scripts.release(name, sent=action == "sent")
            naive.release(name, sent=action == "sent")
