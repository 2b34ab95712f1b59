"""Usage under a real vLLM: what the ledger says is what vLLM's own counters say, to the token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetkeeper_engine.in_vllm.vllm_settings import ENVIRONMENT, INTERNAL_HEADER, SCHEDULER_FACTORY
from fleetkeeper_engine.shm.ledger import FILE, Entry, LedgerHead, LedgerReader, Tokens
from tests.support.engine.grants import GrantKey, grants_text, write_grants
from tests.support.engine.inside_engine import MODEL, TOKEN, InsideEngine, client
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S

REQUESTS = 300
AT_ONCE = 24
GRANT = "x-test-grant"
GRANTED = f"""
from fleetkeeper_engine.in_vllm.http.grants.identity import SCOPE_KEY, GrantIdentity
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.shm.layout import Tier

class Granted(TierMiddleware):
    '''Takes the identity from a header, in place of a signed grant.'''

    def __call__(self, scope, receive, send):
        attempt = dict(scope.get("headers") or ()).get(b"{GRANT}")
        if attempt is not None:
            attempt = attempt.decode()
            scope[SCOPE_KEY] = GrantIdentity(attempt, f"r-{{attempt}}", "key-1", Tier.BATCH, 1e12)
        return super().__call__(scope, receive, send)
"""

pytestmark = pytest.mark.timeout(1800)


@dataclass
class Sent:
    """A request, and what its client knows of its end."""

    attempt: str | None
    sequences: int
    prompts: int
    usage: dict[str, Any] | None = None
    status: int = 0


@dataclass
class Bench:
    """An engine, and what was sent to it."""

    url: str
    ledger: Path
    identity: Callable[[str], dict[str, str]]
    """The headers that name an attempt."""
    internal_token: str
    until_idle: Callable[[], Awaitable[object]]
    sent: list[Sent] = field(default_factory=list)

    @classmethod
    def inside(cls, engine: InsideEngine) -> Bench:
        """Return the bench of an engine with the middleware `Granted`."""
        return cls(
            engine.url,
            engine.ledger,
            lambda attempt: {GRANT: attempt},
            TOKEN,
            engine.until_idle,
        )

    def read(self) -> tuple[LedgerHead, list[Entry]]:
        reader = LedgerReader.open(self.ledger)
        assert reader is not None
        with reader:
            head = reader.head()
            assert head is not None
            return head, [item for _, item, _ in reader.entries(1, head.newest)]

    def counters(self) -> tuple[Tokens, int]:
        """vLLM's own: prompt, cached and answer tokens; and hits of the prefix cache."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=300) as answer:
            text = answer.read().decode()
        found: dict[str, int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    found[sample.name] = found.get(sample.name, 0) + int(sample.value)
        counted = Tokens(
            found["vllm:prompt_tokens_total"],
            found["vllm:prompt_tokens_cached_total"],
            found["vllm:generation_tokens_total"],
        )
        return counted, found["vllm:prefix_cache_hits_total"]


INSIDE = (f"--scheduler-cls={SCHEDULER_FACTORY}", "--middleware=granted_for_a_test.Granted")


def granted_module(directory: Path) -> Path:
    file = directory / "granted_for_a_test.py"
    file.write_text(GRANTED)
    return file


@pytest.fixture(scope="module")
def bench(engine: RunningEngine) -> Iterator[Bench]:
    """The shared engine, which knows the key of the grants that name attempts and demands none."""
    key = GrantKey()
    assert engine.run_directory is not None
    file = write_grants(engine.signer.directory, grants_text(key, demanded=False))
    engine.wait_for(lambda: key.jwk["kid"] in engine.log, "trust in the grant key")

    def identity(attempt: str) -> dict[str, str]:
        grant = key.grant(jti=attempt, rid=f"r-{attempt}", key="key-1")
        return {"Authorization": f"Bearer {grant}"}

    settings = json.loads(engine.vllm_process("APIServer").environ()[ENVIRONMENT])
    yield Bench(
        engine.url,
        engine.run_directory / FILE,
        identity,
        settings["internal_token"],
        lambda: asyncio.to_thread(engine.wait_idle),
    )
    file.unlink()


def random_request(dice: random.Random) -> tuple[str, dict[str, Any], Sent]:
    """A path, a body, and how many sequences it makes."""
    choices = dice.choice([1, 1, 1, 2, 4])
    body: dict[str, Any] = {
        "model": MODEL,
        "n": choices,
        "max_tokens": dice.randint(1, 60),
        "temperature": dice.choice([0.7, 1.2]),
        "ignore_eos": dice.random() < 0.7,
        "stream": dice.random() < 0.5,
    }
    if body["stream"] and dice.random() < 0.8:
        body["stream_options"] = {"include_usage": True}
    if dice.random() < 0.15:
        body["stop"] = [dice.choice(["a", "e", " "])]
    if dice.random() < 0.05:
        body["max_tokens"] = 10**6  # more than the model has: vLLM refuses it
    prompts = 1
    words = ["one", "two", "three", "four", "five", "six"]
    text = " ".join(dice.choices(words, k=dice.randint(1, 200)))
    if dice.random() < 0.4:
        body["messages"] = [{"role": "user", "content": "one " * 64 + text}]
        path = "/v1/chat/completions"
    else:
        prompts = dice.choice([1, 1, 2, 3])
        prompt = [text + " one" * index for index in range(prompts)]
        body["prompt"] = prompt if prompts > 1 else text
        path = "/v1/completions"
    return path, body, Sent(None, choices * prompts, prompts)


async def send(
    bench: Bench, session: aiohttp.ClientSession, number: int, dice: random.Random
) -> None:
    path, body, sent = random_request(dice)
    headers: dict[str, str] = {}
    if dice.random() < 0.8:
        sent.attempt = f"attempt-{number}"
        headers = bench.identity(sent.attempt)
    elif dice.random() < 0.3:
        headers[INTERNAL_HEADER] = bench.internal_token
    bench.sent.append(sent)
    patience = dice.uniform(0.0, 1.5) if dice.random() < 0.4 else 600.0
    try:
        async with (
            asyncio.timeout(patience),
            session.post(bench.url + path, json=body, headers=headers) as response,
        ):
            sent.status = response.status
            text = await response.text()
    except TimeoutError:
        return
    if sent.status == 200:
        sent.usage = usage_of(text, streamed=body["stream"])


def usage_of(text: str, *, streamed: bool) -> dict[str, Any] | None:
    if not streamed:
        found: dict[str, Any] = json.loads(text)["usage"]
        return found
    for line in text.splitlines():
        if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
            return dict(usage)
    return None


@asynccontextmanager
async def load(bench: Bench, dice: random.Random, count: int) -> AsyncIterator[None]:
    """Random requests, some at once; ends when the engine has nothing more to do."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        async with free:
            await send(bench, session, number, random.Random(dice.random()))

    first = len(bench.sent)
    async with client() as session:
        async with asyncio.TaskGroup() as tasks:
            for number in range(first, first + count):
                tasks.create_task(one(session, number))
        yield
    await bench.until_idle()


async def settled(bench: Bench) -> tuple[LedgerHead, list[Entry], Tokens, int]:
    """The ledger and the counters once they are equal, or what they are after a minute."""
    deadline = asyncio.get_running_loop().time() + GUARD_S
    while True:
        head, entries = bench.read()
        counted, hits = await asyncio.to_thread(bench.counters)
        if head.sums.total == counted or asyncio.get_running_loop().time() > deadline:
            return head, entries, counted, hits
        await asyncio.sleep(0.2)


@pytest.mark.promise("usage")
async def test_the_ledger_equals_the_engines_own_counters(bench: Bench) -> None:
    """300 random requests: streamed or whole, n > 1, several prompts, refused ones, clients that hang up."""
    async with load(bench, random.Random(19), REQUESTS):
        pass
    head, entries, counted, hits = await settled(bench)
    assert head.counting
    assert (head.errors, head.newest) == (0, len(entries))
    assert head.sums.total == counted
    attributed = Tokens()
    for item in entries:
        attributed = attributed.plus(item.tokens) if item.attributed else attributed
    assert attributed.plus(head.sums.unattributed) == counted
    assert 0 < head.sums.unattributed.prompt < counted.prompt
    assert 0 < counted.cached <= hits
    mine = {sent.attempt for sent in bench.sent}
    aborted = sum(item.aborted and item.attempt in mine for item in entries)
    print(f"{len(entries)} entries, {aborted} aborted: {counted}, prefix cache hits {hits}")
    assert aborted > 10


@pytest.mark.promise("usage")
async def test_each_attempt_has_one_entry_with_what_its_client_was_told(bench: Bench) -> None:
    """vLLM tells the prompt of n answers once and reads it n times; the ledger counts what was read.

    After a hang-up, a task of vLLM may add a sequence to a request that has its entry: that is a second one.
    """
    async with load(bench, random.Random(20), 40):
        pass
    _, entries, _, _ = await settled(bench)
    mine = {sent.attempt for sent in bench.sent if sent.attempt}
    attributed = [item for item in entries if item.attempt in mine]
    by_attempt = {item.attempt: item for item in attributed}
    twice = [attempt for attempt, n in Counter(one.attempt for one in attributed).items() if n > 1]
    told = [sent for sent in bench.sent if sent.attempt and sent.usage]
    assert len(told) > 50
    for sent in told:
        found = by_attempt[str(sent.attempt)]
        assert sent.usage is not None
        assert found.tokens.answer == sent.usage["completion_tokens"]
        choices = sent.sequences // sent.prompts
        assert found.tokens.prompt == choices * sent.usage["prompt_tokens"]
        assert (found.request, found.key) == (f"r-{sent.attempt}", "key-1")
        assert not found.aborted
    answered = {sent.attempt for sent in bench.sent if sent.attempt and sent.status}
    assert answered.isdisjoint(twice)
    assert answered <= by_attempt.keys()


class Embedding(InsideEngine):
    """The tiny model as a model of embeddings, which generates nothing."""

    def _warm(self) -> None:
        """Embed once; it cannot complete."""
        body = json.dumps({"model": MODEL, "input": "one two three"}).encode()
        headers = {"Content-Type": "application/json", INTERNAL_HEADER: TOKEN}
        request = urllib.request.Request(f"{self.url}/v1/embeddings", body, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert answer.status == 200


@pytest.mark.exhaustive
async def test_embeddings_are_counted_by_their_prompts(tmp_path: Path) -> None:
    """Several inputs in one request, and clients that hang up."""
    engine = Embedding(
        tmp_path,
        environment={"PYTHONPATH": str(granted_module(tmp_path).parent)},
        inside=INSIDE,
        arguments=("--runner=pooling", "--convert=embed"),
    )
    bench = Bench.inside(engine)
    told: dict[str, int] = {}

    async def embed(session: aiohttp.ClientSession, number: int) -> None:
        body = {"model": MODEL, "input": ["one two " * (number + 1)] * (1 + number % 5)}
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(0.05 if number % 7 == 3 else 600.0),
                session.post(
                    f"{engine.url}/v1/embeddings", json=body, headers={GRANT: f"e-{number}"}
                ) as response,
            ):
                told[f"e-{number}"] = (await response.json())["usage"]["prompt_tokens"]

    try:
        async with client() as session, asyncio.TaskGroup() as tasks:
            for number in range(40):
                tasks.create_task(embed(session, number))
        await engine.until_idle()
        head, entries, counted, _ = await settled(bench)
    finally:
        engine.stop()
    assert head.sums.total == counted
    assert counted.answer == 0
    assert len(told) >= 34
    found = {entry.attempt: entry.tokens.prompt for entry in entries if entry.attributed}
    assert {name: found[name] for name in told} == told


@pytest.mark.exhaustive
async def test_an_api_server_that_is_killed_leaves_a_ledger_to_continue(tmp_path: Path) -> None:
    """What was entered before is read as it was."""
    engine = InsideEngine(
        tmp_path,
        environment={"PYTHONPATH": str(granted_module(tmp_path).parent)},
        inside=INSIDE,
        arguments=("--enable-prefix-caching",),
    )
    bench = Bench.inside(engine)
    try:
        async with load(bench, random.Random(21), 10):
            pass
        head, entries, _, _ = await settled(bench)
        engine.kill()
        assert bench.read() == (head, entries)
    finally:
        engine.stop()
