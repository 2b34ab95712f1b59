"""Which tokens belong to which request: with a stand-in for vLLM's class, driven as vLLM drives it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.grants.identity import SCOPE_KEY, GrantIdentity
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.in_vllm.usage.accounts import CURRENT, Accounts
from fleetkeeper_engine.in_vllm.usage.hooks import MODULE, hook, install
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.shm.ledger import Entry, LedgerReader, LedgerWriter, Tokens
from tests.support.engine.middleware_calls import Call

ADAPTER = SimpleNamespace(lora_name="adapter")


@dataclass
class State:
    """The part of vLLM's RequestState that matters."""

    request_id: str
    is_prefilling: bool = True


@dataclass
class Processor:
    """Handles outputs in the order in which vLLM's OutputProcessor does."""

    request_states: dict[str, State] = field(default_factory=dict)
    counted: list[tuple[int, int, int]] = field(default_factory=list)

    def add_request(self, request: Any, _prompt: str | None, *_: object) -> None:
        self.request_states[request.request_id] = State(request.request_id)

    def abort_requests(self, request_ids: list[str], **_: object) -> list[str]:
        return [name for name in request_ids if self.request_states.pop(name, None)]

    def propagate_error(self, _error: Exception) -> None:
        self.counted.append((0, 0, 0))

    def _finish_request(self, state: State) -> None:
        del self.request_states[state.request_id]

    def _update_stats_from_output(self, state: State, output: Any, *_: object) -> None:
        prefill = output.prefill_stats if state.is_prefilling else None
        self.counted.append(
            (
                prefill.num_prompt_tokens if prefill else 0,
                prefill.num_cached_tokens if prefill else 0,
                len(output.new_token_ids),
            )
        )

    def step(self, name: str, answer: int, prompt: int = 0, cached: int = 0, *, last: bool) -> None:
        """One output of the engine."""
        state = self.request_states.get(name)
        if state is None:
            return
        prefill = SimpleNamespace(num_prompt_tokens=prompt, num_cached_tokens=cached)
        output = SimpleNamespace(new_token_ids=[0] * answer, prefill_stats=prefill)
        self._update_stats_from_output(state, output, 0.0, None)
        state.is_prefilling = False
        if last:
            self._finish_request(state)

    def total(self) -> Tokens:
        """What vLLM's counters would say."""
        return Tokens(*(sum(counts) for counts in zip(*self.counted, strict=True)))


class Bench:
    """A processor of its own class, hooked, and its ledger."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "usage-ledger"
        self.writer = LedgerWriter.open(self.path)
        self.accounts = Accounts(self.writer, lambda: 99.0)
        self.kind: Any = type("OutputProcessor", (Processor,), {})
        hook(self.kind, self.accounts)
        self.processor: Processor = self.kind()

    def add(self, name: str, adapter: object = None) -> None:
        self.processor.add_request(SimpleNamespace(request_id=name, lora_request=adapter), "text")

    def entries(self) -> list[Entry]:
        reader = LedgerReader.open(self.path)
        assert reader is not None
        with reader:
            head = reader.head()
            assert head is not None
            return [item for _, item, _ in reader.entries(1, head.newest)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def granted(number: int = 1) -> GrantIdentity:
    return GrantIdentity(f"attempt-{number}", f"request-{number}", "key", Tier.BATCH, 1e12)


async def test_all_sequences_of_a_request_are_one_entry(bench: Bench) -> None:
    """Also those that tasks of the request add."""
    account = bench.accounts.open(granted(), Tier.BATCH)

    async def child() -> None:
        bench.add("c", ADAPTER)

    CURRENT.set(account)
    bench.add("a", ADAPTER)
    bench.add("b", ADAPTER)
    await asyncio.create_task(child())
    for name in "abc":
        bench.processor.step(name, 1, 10, 4, last=False)
        bench.processor.step(name, 2, 10, 4, last=True)
    assert bench.entries() == []
    bench.accounts.end(account)
    assert bench.entries() == [
        Entry(Tokens(30, 12, 9), 99.0, "attempt-1", "request-1", "key", "adapter", Tier.BATCH)
    ]


def test_a_request_that_hung_up_is_entered_when_vllm_counts_no_more(bench: Bench) -> None:
    account = bench.accounts.open(granted(), Tier.BATCH)
    outside = CURRENT.set(account)
    bench.add("a")
    CURRENT.reset(outside)
    bench.processor.step("a", 1, 10, last=False)
    bench.accounts.end(account)
    bench.processor.step("a", 1, last=False)
    assert bench.entries() == []
    assert bench.processor.abort_requests(["a"], internal=True) == ["a"]
    bench.processor.step("a", 1, last=False)
    (found,) = bench.entries()
    assert (found.tokens, found.aborted) == (Tokens(10, 0, 2), True)
    assert bench.processor.total() == found.tokens


def test_requests_of_nobody_are_unattributed(bench: Bench) -> None:
    """Those of the supervisor have no account, and those without a grant have no identity."""
    bench.add("own")
    bench.processor.step("own", 1, 2, last=True)
    account = bench.accounts.open(None, Tier.REALTIME)
    outside = CURRENT.set(account)
    bench.add("b")
    CURRENT.reset(outside)
    bench.processor.step("b", 5, 6, last=True)
    bench.accounts.end(account)
    first, second = bench.entries()
    assert (first.attributed, first.tier, first.tokens) == (False, None, Tokens(2, 0, 1))
    assert (second.attributed, second.tier) == (False, Tier.REALTIME)
    assert bench.writer.head.sums.unattributed == bench.processor.total() == Tokens(8, 0, 6)


def test_a_grant_that_took_no_token_is_entered_so_that_it_can_be_settled(bench: Bench) -> None:
    bench.accounts.end(bench.accounts.open(granted(), Tier.BATCH))
    bench.accounts.end(bench.accounts.open(None, Tier.BATCH))
    (found,) = bench.entries()
    assert (found.attempt, found.tokens) == ("attempt-1", Tokens())


def test_what_follows_the_entry_of_a_request_is_entered_too(bench: Bench) -> None:
    account = bench.accounts.open(granted(), Tier.BATCH)
    outside = CURRENT.set(account)
    bench.add("a")
    bench.processor.step("a", 1, 1, last=True)
    bench.accounts.end(account)
    bench.add("late")
    CURRENT.reset(outside)
    bench.processor.step("late", 2, 2, last=True)
    assert [item.tokens for item in bench.entries()] == [Tokens(1, 0, 1), Tokens(2, 0, 2)]


def test_a_dead_engine_ends_all_sequences(bench: Bench) -> None:
    account = bench.accounts.open(granted(), Tier.BATCH)
    outside = CURRENT.set(account)
    bench.add("a")
    CURRENT.reset(outside)
    bench.processor.step("a", 3, 4, last=False)
    bench.processor.propagate_error(RuntimeError("dead"))
    bench.accounts.end(account)
    (found,) = bench.entries()
    assert (found.tokens, found.aborted) == (Tokens(4, 0, 3), True)


def test_any_order_of_events_keeps_the_sums_equal(bench: Bench) -> None:
    """2,000 requests begin, count, hang up, finish, in a random order."""
    dice = random.Random(20)
    open_: list[tuple[Any, list[str]]] = []
    for number in range(2_000):
        account = bench.accounts.open(granted(number) if dice.random() < 0.7 else None, Tier.BATCH)
        names = [f"{number}-{index}" for index in range(dice.randint(0, 3))]
        outside = CURRENT.set(account)
        for name in names:
            bench.add(name)
        CURRENT.reset(outside)
        open_.append((account, names))
        for _ in range(dice.randint(0, 8)):
            some, of_it = dice.choice(open_)
            if of_it:
                prompt = dice.randint(1, 9)
                bench.processor.step(
                    dice.choice(of_it),
                    dice.randint(0, 3),
                    prompt,
                    dice.randint(0, prompt),
                    last=dice.random() < 0.2,
                )
            if dice.random() < 0.2 and not some.ended:
                bench.accounts.end(some)
            if dice.random() < 0.1:
                bench.processor.abort_requests(of_it, internal=True)
    for account, names in open_:
        bench.processor.abort_requests(names, internal=True)
        if not account.ended:
            bench.accounts.end(account)
    entries = bench.entries()
    total = Tokens()
    for item in entries:
        total = total.plus(item.tokens)
    assert total == bench.processor.total() == bench.writer.head.sums.total
    attempts = [item.attempt for item in entries if item.attempt]
    assert len(attempts) == len(set(attempts)) == sum(1 for a, _ in open_ if a.identity)


def test_a_broken_ledger_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once; what vLLM's methods return stays as it was."""
    bench = Bench(tmp_path)
    full = LedgerWriter(os.open("/dev/full", os.O_WRONLY), 4, "boot", bench.writer.head)
    accounts = Accounts(full)
    kind: Any = type("OutputProcessor", (Processor,), {})
    hook(kind, accounts)
    processor = kind()
    with caplog.at_level(logging.ERROR):
        for name in "abc":
            processor.add_request(SimpleNamespace(request_id=name), "text")
            processor.step(name, 1, 1, last=True)
        # An interface that changed: outputs without the field that is counted.
        processor.add_request(SimpleNamespace(request_id="d"), "text")
        broken = SimpleNamespace(new_token_ids=None, prefill_stats=None)
        with pytest.raises(TypeError):  # the stand-in's own
            processor._update_stats_from_output(State("d"), broken)
        assert processor.abort_requests(["d"], internal=False) == ["d"]
    assert [record.message for record in caplog.records] == ["usage is not counted completely"]
    assert full.head.errors >= 3


def test_a_count_that_makes_no_sense_fails_no_request(bench: Bench) -> None:
    """A vLLM that counts otherwise costs that count, and none of later requests."""
    for number, cached in ((1, -1), (2, 2)):
        account = bench.accounts.open(granted(number), Tier.BATCH)
        outside = CURRENT.set(account)
        bench.add("a")
        CURRENT.reset(outside)
        bench.processor.step("a", 1, 5, cached, last=True)
        bench.accounts.end(account)
    assert [item.tokens for item in bench.entries()] == [Tokens(5, 0, 1), Tokens(5, 2, 1)]
    assert bench.writer.head.errors == 1


@pytest.mark.parametrize("missing", ["add_request", "_finish_request", "prefill_stats", "module"])
def test_a_vllm_without_what_is_needed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    bench = Bench(tmp_path)
    bases = {name: value for name, value in vars(Processor).items() if name != missing}
    kind = type("OutputProcessor", (), bases)
    fields = {
        "new_token_ids": list,
        **({} if missing == "prefill_stats" else {"prefill_stats": object}),
    }
    module = SimpleNamespace(
        OutputProcessor=kind, EngineCoreOutput=type("Output", (), {"__annotations__": fields})
    )
    if missing == "module":
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
    else:
        monkeypatch.setitem(sys.modules, MODULE, module)
    before = dict(vars(kind))
    assert not install(bench.accounts)
    assert dict(vars(kind)) == before
    assert not bench.writer.head.counting


def test_a_vllm_with_what_is_needed_is_hooked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    kind = type("OutputProcessor", (Processor,), {})
    output = type("Output", (), {"__annotations__": {"prefill_stats": object}})
    module = SimpleNamespace(OutputProcessor=kind, EngineCoreOutput=output)
    monkeypatch.setitem(sys.modules, MODULE, module)
    assert install(bench.accounts)
    once = dict(vars(kind))
    assert install(bench.accounts)
    assert dict(vars(kind)) == once
    assert bench.writer.head.counting


async def test_the_middleware_opens_and_ends_an_account(bench: Bench) -> None:
    """vLLM's sequences find it although they are added in a task of their own."""

    async def vllm(_scope: object, receive: Any, send: Any) -> None:
        await receive()

        async def generate() -> None:
            bench.add("a")
            bench.processor.step("a", 2, 3, last=True)

        await asyncio.create_task(generate())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done", "more_body": False})

    app = TierMiddleware(vllm, VllmSettings(), accounts=bench.accounts)
    identity: dict[str, Any] = {SCOPE_KEY: granted()}
    call = Call(app, **identity)
    await asyncio.wait_for(call.task, 60)
    assert call.sent[-1]["body"] == b"done"
    (found,) = bench.entries()
    assert (found.attempt, found.tokens, found.aborted) == ("attempt-1", Tokens(3, 0, 2), False)
    assert found.tier is Tier.BATCH
