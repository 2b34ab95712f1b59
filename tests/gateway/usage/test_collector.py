"""Reading engines over HTTP: their own control port with real tokens, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_contract.tiers import Tier as EngineTier
from fleetkeeper_gateway.grants.attempts import AttemptChecker, new_attempt
from fleetkeeper_gateway.grants.keys import read_keys
from fleetkeeper_gateway.grants.settings import GrantSettings
from fleetkeeper_gateway.grants.signer import create_key_files
from fleetkeeper_gateway.usage import engines as reading
from fleetkeeper_gateway.usage import metrics
from tests.support.gateway.usage_bench import Bench, never, until


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.store.close()


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
    async with bench.engine("one") as one, bench.running():
        one.work(3)
        one.work(1, granted=False)
        await until(lambda: len(bench.limiter.calls) == 3)
        bench.limiter.fails = lambda _: True
        before = metrics.SETTLE_FAILURES._value.get()
        one.work(2)
        await until(lambda: metrics.SETTLE_FAILURES._value.get() == before + 2)
        bench.limiter.fails = lambda _: False
        one.work(1)
        await until(lambda: len(bench.limiter.calls) == 4)
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
            _page(
                next=2,
                newest=2,
                entries=[_entry(n=n, attempt=None, key=None, prompt=2**53) for n in (1, 2)],
            ),
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

    failed = metrics.FAILED_READINGS.labels("other/chat")._value
    before = failed.get()
    async with (
        bench.answering("bad", by=wrong, namespace="other"),
        bench.engine("good") as good,
    ):
        good.work(1)
        await bench.read_all()
    report = bench.report()
    assert [key for key, *_ in report.rows] == ["key-1"]
    assert report.unattributed.requests == 0
    assert metrics.UNREACHABLE._value.get() == 1
    assert failed.get() == before + 1


async def test_a_pod_that_terminates_is_read_until_it_is_gone(bench: Bench) -> None:
    """Its supervisor ends when the last entry was read, long before the next regular reading."""
    async with bench.running(period_s=300.0) as collector:
        async with bench.engine("one") as one:
            collector.follow(bench.targets[0])
            await until(one.port._asked.is_set)
            one.port._asked.clear()
            collector.follow(replace(bench.targets[0], terminating=True))
            collector.leave("one")
            await until(one.port._asked.is_set)
            one.work(7)
            await one.port.wait_until_read()
            assert bench.read_up_to("one") == 7
        await until(lambda: not collector._pods)
    assert bench.report().rows["key-1", "served", "batch", "team/chat"].requests == 7


async def test_a_pod_that_is_gone_is_read_no_more(bench: Bench) -> None:
    """Also if it was gone before it was first read. One that comes again is read again."""
    async with bench.engine("one") as one, bench.running() as collector:
        collector.follow(bench.targets[0])
        await until(one.port._asked.is_set)
        collector.leave("one")
        await until(lambda: not collector._pods)
        assert metrics.PODS._value.get() == 0
        one.work(1)
        collector.follow(bench.targets[0])
        await until(lambda: bench.read_up_to("one") == 1)


async def test_pods_that_terminate_together_are_read_apart(bench: Bench) -> None:
    """One on a dead node answers nothing until the deadline. A supervisor waits 3 s for its reader."""
    async with (
        bench.answering("bad", by=never, namespace="team"),
        bench.engine("one") as one,
        bench.running(period_s=300.0) as collector,
    ):
        await until(one.port._asked.is_set)
        one.work(7)
        for target in bench.targets:
            collector.follow(replace(target, terminating=True))
        await until(lambda: bench.read_up_to("one") == 7)
        assert "bad" not in collector._problems


async def test_a_supervisor_that_nobody_reads_ends_at_once(bench: Bench) -> None:
    async with bench.engine("one") as one:
        one.work(1)
        with pytest.raises(StopIteration):  # it returned and awaited nothing
            one.port.wait_until_read().send(None)


async def test_engines_that_do_not_count_are_told(bench: Bench) -> None:
    """Until they count, or are gone."""
    async with bench.engine("one") as one, bench.engine("two") as two:
        for engine in (one, two):
            engine.writer.set_state(counting=False)
        async with bench.running() as collector:
            await until(lambda: metrics.NOT_COUNTING._value.get() == 2)
            one.writer.set_state(counting=True)
            await until(lambda: metrics.NOT_COUNTING._value.get() == 1)
            collector.leave("two")
            await until(lambda: metrics.NOT_COUNTING._value.get() == 0)


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
    forged = metrics.FORGED.labels("team/chat")._value.get()
    async with bench.engine("one") as engine:
        engine.work(1)
        engine.writer.write(replace(engine.written[0], **claim))
        await bench.read_all()
    report = bench.report()
    assert [row.requests for row in report.rows.values()] == [1]
    assert report.unattributed.requests == 1
    assert metrics.FORGED.labels("team/chat")._value.get() == forged + 1
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
