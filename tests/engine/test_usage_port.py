"""Usage through the control port of a whole engine: signed requests, grants, and pid 1 that stays small."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.shm.ledger import CAPACITY, FILE, Entry, LedgerWriter, Tokens
from tests.support.engine.grants import GrantKey, grants_text, write_grants
from tests.support.engine.supervised_engine import RunningEngine

pytestmark = pytest.mark.timeout(1800)
MB = 1_000_000
GIVEN_BACK_S = 60.0
NAMES = ("prompt", "cached", "answer")


class Reader:
    """The gateway's side of one engine."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.key = GrantKey()

    def get(self, token: str | None = None, **query: object) -> requests.Response:
        token = self.key.usage_token(self.engine.uid) if token is None else token
        return requests.get(
            f"{self.engine.control_url}/v1/usage",
            params={name: str(value) for name, value in query.items()},
            headers={"Authorization": f"Bearer {token}"},
            timeout=300,
        )

    def pages(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """All entries, and the last page."""
        boot, after, entries = "", 0, []
        while True:
            answer = self.get(boot=boot, after=after)
            assert answer.status_code == 200, answer.text
            page = answer.json()
            entries += page["entries"]
            boot, after = page["boot"], page["next"]
            if after == page["newest"]:
                return entries, page

    def complete(self, attempt: str, tokens: int) -> dict[str, Any]:
        grant = self.key.grant(jti=attempt, rid=f"r-{attempt}", tier="batch", key="alice")
        answer = requests.post(
            f"{self.engine.url}/v1/completions",
            json={"model": "tiny", "prompt": "one two", "max_tokens": tokens, "ignore_eos": True},
            headers={"Authorization": f"Bearer {grant}"},
            timeout=600,
        )
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def is_attributed(self) -> bool:
        """Whether a request, which this sends, is in the ledger under its attempt."""
        attempt = f"trust-{secrets.token_hex(4)}"
        self.complete(attempt, 1)
        self.engine.wait_for(self.is_complete, "equal sums")
        return any(entry["attempt"] == attempt for entry in self.pages()[0])

    def is_complete(self) -> bool:
        """Whether the ledger holds each token that vLLM counted."""
        return bool(self.pages()[1]["totals"] == self.counters())

    def counters(self) -> dict[str, int]:
        """vLLM's own."""
        metrics = self.engine.metrics()
        names = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens")
        found = [
            sum(
                int(value)
                for name, value in metrics.items()
                if name.startswith(f"vllm:{one}_total")
            )
            for one in names
        ]
        return dict(zip(NAMES, found, strict=True))


@pytest.fixture
def reader(engine: RunningEngine) -> Any:
    """A reader whose key the engine trusts; grants are accepted and not demanded."""
    found = Reader(engine)
    file = write_grants(engine.signer.directory, grants_text(found.key, demanded=False))
    engine.wait_for(lambda: found.get().status_code == 200, "trust in the grant key")
    # vLLM's process reads the file on its own, once a second.
    engine.wait_for(found.is_attributed, "an attempt with its grant")
    yield found
    file.unlink()
    engine.wait_for(lambda: found.get().status_code == 401, "the end of the trust")


def test_the_control_port_tells_what_each_attempt_took(reader: Reader) -> None:
    """The supervisor's own requests are unattributed, and the sums are vLLM's counters."""
    before = len(reader.pages()[0])
    usage = {
        attempt: reader.complete(attempt, 7) for attempt in ("port-attempt-1", "port-attempt-2")
    }
    reader.engine.complete(5)
    reader.engine.wait_for(reader.is_complete, "equal sums")
    entries, page = reader.pages()
    assert page["counting"]
    assert page["errors"] == page["lost"] == 0
    # An entry is written when its request has left both processes, which is not the order of answers.
    found = {entry["attempt"]: entry for entry in entries[before:]}
    assert found.keys() == {*usage, None}
    assert len(entries) == before + 3
    plain = found.pop(None)
    for attempt, entry in found.items():
        assert entry["request"] == f"r-{attempt}"
        assert (entry["key"], entry["tier"], entry["model"]) == ("alice", "batch", "tiny")
        assert entry["prompt"] == usage[attempt]["prompt_tokens"]
        assert entry["answer"] == usage[attempt]["completion_tokens"] == 7
        assert not entry["aborted"]
    assert (plain["attempt"], plain["key"], plain["tier"]) == (None, None, "standard")
    rest = [entry for entry in entries if entry["attempt"] is None]
    assert page["unattributed"] == {name: sum(e[name] for e in rest) for name in NAMES}
    # The probe before the first request of a client.
    assert entries[0]["attempt"] is None
    assert entries[0]["answer"] > 0


def test_usage_needs_a_token_of_the_gateway_for_this_pod(reader: Reader) -> None:
    engine, key = reader.engine, reader.key
    for token in (
        "",
        key.usage_token("another-pod"),
        key.grant(aud=engine.uid),
        GrantKey().usage_token(engine.uid),
        engine.signer.token(engine.uid),
        key.usage_token(engine.uid, exp=int(time.time()) - 100, iat=int(time.time()) - 160),
    ):
        assert reader.get(token).status_code == 401, token
    assert reader.get(after="-1").status_code == 422
    assert reader.get(after="x" * 100).status_code == 422
    boot = reader.pages()[1]["boot"]
    assert reader.get(boot=boot, after=10**17).json()["entries"] == []
    assert reader.get(boot="another", after=10**17).json()["entries"][0]["n"] == 1


@pytest.mark.exhaustive
def test_reading_a_full_ledger_keeps_the_supervisor_small(reader: Reader, tmp_path: Path) -> None:
    """20,000 entries in 20 pages, ten times: less than 60 MB afterwards, and nothing is kept."""
    engine = reader.engine
    assert engine.run_directory is not None
    real = engine.run_directory / FILE
    kept = real.rename(engine.run_directory / "kept")
    try:
        writer = LedgerWriter.open(real)
        for number in range(CAPACITY + 100):
            name = f"{number:032x}"
            writer.write(Entry(Tokens(100, 50, 20), 1e9, name, name, "key", tier=Tier.BATCH))
        writer.close()
        for _ in range(10):
            entries, _ = reader.pages()
            assert len(entries) == CAPACITY
        process = psutil.Process(engine.process.pid)
        print(f"supervisor right after: {process.memory_info().rss / MB:.1f} MB")
        engine.wait_for(
            lambda: process.memory_info().rss < 60 * MB, "a small supervisor", GIVEN_BACK_S
        )
        print(f"supervisor: {process.memory_info().rss / MB:.1f} MB")
    finally:
        kept.rename(real)
    assert json.dumps(reader.pages()[1]["totals"]) == json.dumps(reader.counters())
