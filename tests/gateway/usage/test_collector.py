"""Reading engines over HTTP: their own control port with real tokens, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper_contract.usage_files import Report
from fleetkeeper_engine.shm.layout import Tier as EngineTier
from fleetkeeper_gateway.grants.attempts import AttemptChecker, new_attempt
from fleetkeeper_gateway.grants.keys import read_keys
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.grants.signer import UsageTokenSigner, create_key_files
from fleetkeeper_gateway.interfaces import Admission, Demand
from fleetkeeper_gateway.tiers import Tier
from fleetkeeper_gateway.usage import collector as reading
from fleetkeeper_gateway.usage import metrics
from fleetkeeper_gateway.usage.collector import Collector
from fleetkeeper_gateway.usage.lines import Pod
from fleetkeeper_gateway.usage.pods import Target
from fleetkeeper_gateway.usage.store import UsageStore
from tests.support.usage_engine import Engine, an_engine, serving

GUARD_S = 60.0


class Settled:
    """A limiter that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tier, str, int]] = []
        self.fails = False

    async def admit(self, _demand: Demand) -> Admission:
        raise AssertionError("nothing is admitted here")

    async def settle(self, key_id: str, tier: Tier, request_id: str, tokens: int) -> None:
        if self.fails:
            raise ConnectionError("Redis is gone")
        self.calls.append((key_id, tier, request_id, tokens))

    async def close(self) -> None:
        return


class Bench:
    """A collector, and the engines that it reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files = new_grant_keys()
        (directory / "keys").mkdir()
        for name, text in files.items():
            (directory / "keys" / name).write_text(text)
        listed = json.loads(files["jwks.json"])["keys"]
        self.public = {str(key["kid"]): str(key["x"]) for key in listed}
        self.keys = create_key_files(GrantSettings(grant_keys_directory=directory / "keys"))
        self.limiter = Settled()
        self.store = UsageStore(directory / "usage", 90)
        self.store.open(time.time())
        self.targets: list[Target] = []
        self.collector = self.new_collector()

    def new_collector(self, period_s: float = 300.0) -> Collector:
        return Collector(
            self.store,
            lambda: self.targets,
            UsageTokenSigner(self.keys),
            AttemptChecker(self.keys),
            self.limiter,
            period_s=period_s,
        )

    @asynccontextmanager
    async def engine(self, uid: str) -> AsyncIterator[Engine]:
        secret = self.keys.current().attempt_secret
        async with an_engine(self.directory, uid, self.public, secret) as engine:
            self.targets.append(
                Target(Pod(uid, "team", "chat"), f"chat-{uid}", engine.url, terminating=False)
            )
            yield engine

    async def read_all(self) -> None:
        async with aiohttp.ClientSession() as session:
            await self.collector.read_all(session)

    def report(self) -> Report:
        return self.store.report(0.0, 2.0**33, ("key", "model", "tier", "service"))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.store.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not holds():  # noqa: ASYNC110 - other tasks tell no event
            await asyncio.sleep(0.01)


async def test_engines_are_read_to_the_end_of_their_ledgers(bench: Bench) -> None:
    """Also over more than one page; a second reading brings only what is new."""
    async with bench.engine("one") as one, bench.engine("two") as two:
        one.work(2_500)
        two.work(3)
        two.work(2, granted=False)
        await bench.read_all()
        two.work(1)
        await bench.read_all()
    report = bench.report()
    counts = report.rows["key-1", "served", "batch", "team/chat"]
    assert (counts.requests, counts.prompt, counts.cached) == (2_504, 25_040, 10_016)
    assert (report.unattributed.requests, report.unattributed.answer) == (2, 10)
    assert report.lost.requests == 0


async def test_what_the_engine_counted_is_settled_with_the_limits(bench: Bench) -> None:
    """Once for each request of a key; a limiter that fails stops nothing."""
    run = asyncio.create_task(bench.new_collector(period_s=0.05).run())
    async with bench.engine("one") as one:
        one.work(3)
        one.work(1, granted=False)
        await until(lambda: len(bench.limiter.calls) == 3)
        bench.limiter.fails = True
        before = metrics.SETTLE_FAILURES._value.get()
        one.work(2)
        await until(lambda: metrics.SETTLE_FAILURES._value.get() == before + 2)
        bench.limiter.fails = False
        one.work(1)
        await until(lambda: len(bench.limiter.calls) == 4)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert bench.limiter.calls[0] == ("key-1", Tier.BATCH, "r-one-0", 15)
    assert [request for _, _, request, _ in bench.limiter.calls] == [
        "r-one-0",
        "r-one-1",
        "r-one-2",
        "r-one-6",
    ]


async def test_a_token_that_is_not_trusted_reads_nothing(bench: Bench) -> None:
    async with bench.engine("one") as one:
        one.work(1)
        one.port.verifier.trust({})
        await bench.read_all()
        assert bench.report().rows == {}
        assert metrics.UNREACHABLE._value.get() == 1
        url = one.url + "/v1/usage"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 401


async def _raw(body: bytes, status: int = 200, **headers: str) -> web.Response:
    return web.Response(body=body, status=status, headers=headers)


def _page(**changes: Any) -> dict[str, Any]:
    empty = {"prompt": 0, "cached": 0, "answer": 0}
    page = {"boot": "b", "next": 0, "oldest": 1, "newest": 0, "counting": True, "errors": 0}
    return {**page, "entries": [], "totals": empty, "unattributed": empty, "lost": 0, **changes}


def _entry(**changes: Any) -> dict[str, Any]:
    entry = {"n": 1, "attempt": "a", "request": "r", "key": "k", "tier": "batch", "model": "m"}
    counts = {"prompt": 1, "cached": 0, "answer": 1, "aborted": False, "time": 1.0}
    return {**entry, **counts, **changes}


WRONG: list[Callable[[], Awaitable[web.Response]]] = [
    lambda: _raw(b""),
    lambda: _raw(b"{"),
    lambda: _raw(b"[]"),
    lambda: _raw(b"[" * 100_000),
    lambda: _raw(b"x", status=500),
    lambda: _raw(b"", status=302, Location="http://127.0.0.1:9/"),
    lambda: _raw(b" " * (reading.PAGE_BYTES + 1)),
    *(
        lambda page=page: _json(page)
        for page in (
            _page(next=-1),
            _page(next=2**60, newest=2**60),
            _page(boot=""),
            _page(boot="b" * 1000),
            _page(next=5, newest=4),
            _page(totals={"prompt": "1"}),
            _page(next=1, newest=1, entries=[_entry(prompt=-5)]),
            _page(next=1, newest=1, entries=[_entry(prompt=1.5)]),
            _page(next=1, newest=1, entries=[_entry(tier="gold")]),
            _page(next=1, newest=1, entries=[_entry(key=None)]),
            _page(next=1, newest=1, entries=[_entry(key="k" * 1000)]),
            _page(next=1, newest=1, entries=[_entry(n=2)]),
            _page(next=2, newest=2, entries=[_entry(n=2), _entry(n=1)]),
            _page(next=9999, newest=9999, entries=[_entry(n=n) for n in range(1, 1002)]),
        )
    ),
]


async def _json(page: dict[str, Any]) -> web.Response:
    return web.json_response(page)


@pytest.mark.promise("usage-checked")
@pytest.mark.parametrize("answer", WRONG, ids=range(len(WRONG)))
async def test_an_engine_that_answers_anything_disturbs_no_other(
    bench: Bench, answer: Callable[[], Awaitable[web.Response]]
) -> None:
    async def wrong(_request: web.Request) -> web.StreamResponse:
        return await answer()

    async with serving(wrong) as url, bench.engine("good") as good:
        bench.targets.insert(0, Target(Pod("bad", "team", "bad"), "bad-1", url, terminating=False))
        good.work(1)
        await bench.read_all()
    report = bench.report()
    assert [key for key, *_ in report.rows] == ["key-1"]
    assert report.unattributed.requests == 0
    assert metrics.UNREACHABLE._value.get() == 1


async def test_an_engine_that_never_answers_holds_nobody_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up at the deadline, and asked again the next time."""
    monkeypatch.setattr(reading, "DEADLINE_S", 0.3)
    asked = 0

    async def silent(_request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        await asyncio.sleep(GUARD_S)
        raise AssertionError

    async with serving(silent) as url, bench.engine("good") as good:
        silents = [
            Target(Pod(f"bad-{n}", "team", "bad"), f"bad-{n}", url, terminating=False)
            for n in range(40)
        ]
        bench.targets = silents + bench.targets
        good.work(1)
        for _ in range(2):
            await asyncio.wait_for(bench.read_all(), GUARD_S)
    assert asked == 80
    assert bench.report().rows["key-1", "served", "batch", "team/chat"].requests == 1


async def test_a_pod_that_terminates_is_read_until_it_is_gone(bench: Bench) -> None:
    """Its supervisor ends when the last entry was read, long before the next regular reading."""
    collector = bench.new_collector()
    async with bench.engine("one") as one:
        run = asyncio.create_task(collector.run())
        await until(lambda: collector.last_read is not None)
        assert bench.report().rows == {}
        collector.pod_ends(bench.targets[0])
        await until(one.port._asked.is_set)
        one.work(7)
        began = time.monotonic()
        await one.port.wait_until_read()
        assert bench.store.cursor("one").next == 7
        print(f"read after {time.monotonic() - began:.2f} s")
    await until(lambda: not collector._ending)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert bench.report().rows["key-1", "served", "batch", "team/chat"].requests == 7


async def test_pods_that_terminate_together_are_read_apart(bench: Bench) -> None:
    """One on a dead node answers nothing until the deadline. A supervisor waits 3 s for its reader."""

    async def silent(_request: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(GUARD_S)
        raise AssertionError

    asked = asyncio.Event()
    collector = bench.new_collector()
    async with serving(silent) as url, bench.engine("one") as one:
        run = asyncio.create_task(collector.run())
        await until(lambda: collector.last_read is not None)
        bad = Target(Pod("bad", "team", "bad"), "bad", url, terminating=True)
        collector.pod_ends(bad)
        async with asyncio.timeout(GUARD_S):
            await asked.wait()
        one.work(7)
        collector.pod_ends(bench.targets[0])
        await until(lambda: bench.store.cursor("one").next == 7)
        assert "bad" in collector._busy
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_a_supervisor_that_nobody_reads_ends_at_once(bench: Bench) -> None:
    async with bench.engine("one") as one:
        one.work(1)
        began = time.monotonic()
        await one.port.wait_until_read()
        # Far from the seconds of a wait; no reader was there.
        assert time.monotonic() - began < 2.0


async def test_engines_that_do_not_count_are_told(bench: Bench) -> None:
    async with bench.engine("one") as one:
        one.writer.set_state(counting=False)
        await bench.read_all()
        assert metrics.NOT_COUNTING._value.get() == 1
    async with bench.engine("two"):
        bench.targets.pop(0)
        await bench.read_all()
        assert metrics.NOT_COUNTING._value.get() == 0


async def test_a_full_disk_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench.engine("one") as one:
        one.work(3)

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        before = metrics.WRITE_FAILURES._value.get()
        with monkeypatch.context() as patch:
            patch.setattr("fleetkeeper_gateway.usage.store.os.write", full)
            await bench.read_all()
        assert metrics.WRITE_FAILURES._value.get() == before + 1
        assert bench.report().rows == {}
        await bench.read_all()
        assert bench.report().rows["key-1", "served", "batch", "team/chat"].requests == 3


@pytest.mark.promise("usage-checked")
@pytest.mark.parametrize(
    "claim",
    [
        {"key": "another"},
        {"request": "another"},
        {"tier": EngineTier.REALTIME},
        {"attempt": "a" * 40},
        {"attempt": "short"},
    ],
)
async def test_an_engine_cannot_claim_tokens_for_a_request_that_it_was_not_sent(
    bench: Bench, claim: dict[str, Any]
) -> None:
    """Its pod is a tenant's. Otherwise it could use up the limits of any key."""
    forged = metrics.FORGED._value.get()
    async with bench.engine("one") as engine:
        engine.work(1)
        engine.writer.write(replace(engine.written[0], **claim))
        await bench.read_all()
    report = bench.report()
    assert [row.requests for row in report.rows.values()] == [1]
    assert report.unattributed.requests == 1
    assert metrics.FORGED._value.get() == forged + 1
    await asyncio.sleep(0)
    assert {call[0] for call in bench.limiter.calls} <= {"key-1"}


async def test_an_attempt_of_another_service_is_nobodys(bench: Bench) -> None:
    async with bench.engine("one") as engine:
        engine.work(1)
        attempt = new_attempt(engine.secret, "team/other", "r-1", "key-1", "batch")
        entry = replace(engine.written[0], attempt=attempt, request="r-1")
        engine.writer.write(entry)
        await bench.read_all()
    assert bench.report().unattributed.requests == 1


async def test_attempts_count_beyond_a_rotation_of_the_keys(bench: Bench) -> None:
    """Grants of the key that signs next, and of the one before it."""
    before, after = new_grant_keys(), new_grant_keys()
    folder = bench.directory / "rotating"
    folder.mkdir()
    for name, text in before.items():
        (folder / name).write_text(text)
    jwks = [json.loads(files["jwks.json"])["keys"][0] for files in (before, after)]
    (folder / "jwks.json").write_text(json.dumps({"keys": jwks}))
    (folder / "next.pem").write_text(after["signing.pem"])
    (folder / "signFrom").write_text("2020-01-01T00:00:00Z")
    found = read_keys(folder)
    assert found.following is not None
    checker = AttemptChecker(create_key_files(GrantSettings(grant_keys_directory=folder)))
    for key in (found.signing, found.following):
        attempt = new_attempt(key.attempt_secret, "team/chat", "r", "key-1", "batch")
        assert checker.is_ours(attempt, "team/chat", "r", "key-1", "batch")
