"""Grants on a real vLLM: what is refused, whose tier counts, and changes without a failed request."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

import pytest
import requests

from fleetkeeper.adapters.keys import new_grant_keys, rotated_grant_keys
from fleetkeeper_contract.grants import GRANTS_FILE
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_gateway.grants.keys import KeyFiles
from fleetkeeper_gateway.grants.signer import Signer
from fleetkeeper_gateway.interfaces import Service
from tests.support.engine.grants import SERVICE, GrantKey, grants_text, write_grants
from tests.support.engine.supervised_engine import RunningEngine
from tests.support.guards import GUARD_S

BODY = {"model": "tiny", "prompt": "The queue", "max_tokens": 4, "ignore_eos": True}
KEY, OTHER = GrantKey(), GrantKey()


def demanded(engine: RunningEngine) -> float:
    return engine.metrics()["fleetkeeper_grants_demanded"]


def refused(engine: RunningEngine) -> dict[str, float]:
    metrics = engine.metrics()
    return {
        reason: metrics[f'fleetkeeper_grants_refused_total{{reason="{reason}"}}']
        for reason in ("missing", "invalid", "expired", "used")
    }


def put(engine: RunningEngine, text: str) -> None:
    """Write grants.json, and wait until the engine follows it. It is idle meanwhile."""
    write_grants(engine.signer.directory, text)
    wanted = float(json.loads(text)["demanded"])
    engine.wait_for(lambda: demanded(engine) == wanted, f"demanded {wanted}")


@pytest.fixture
def open_again(engine: RunningEngine) -> Iterator[RunningEngine]:
    """The shared engine, which demands nothing when the test ends."""
    yield engine
    (engine.signer.directory / GRANTS_FILE).unlink(missing_ok=True)
    engine.wait_for(lambda: demanded(engine) == 0.0, "open")


def ask(engine: RunningEngine, path: str = "/v1/completions", **headers: str) -> requests.Response:
    body = {**BODY, "prompt": "x"} if path != "/v1/models" else None
    method = "GET" if body is None else "POST"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.request(method, engine.url + path, json=body, headers=named, timeout=600)


def code(response: requests.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.promise("gateway-only", "grants", "grant-demanded", "grant-once")
def test_only_a_fresh_grant_for_this_service_passes_and_only_once(
    open_again: RunningEngine,
) -> None:
    engine = open_again
    put(engine, grants_text(KEY))
    before = refused(engine)
    now = int(time.time())
    for wrong, why in (
        (OTHER.grant(), "grant_invalid"),
        (OTHER.grant(header={"kid": KEY.jwk["kid"]}), "grant_invalid"),
        (KEY.grant(aud="another-service"), "grant_invalid"),
        (KEY.grant(iat=now - 300, exp=now - 240), "grant_expired"),
    ):
        assert code(ask(engine, Authorization=f"Bearer {wrong}")) == (401, why)
        assert code(ask(engine, baggage=f"fleetkeeper-grant={wrong}")) == (401, why)
    for path in ("/v1/completions", "/v1/models", "/tokenize"):
        assert code(ask(engine, path)) == (401, "grant_missing")
    grant = KEY.grant()
    answers = [ask(engine, Authorization=f"Bearer {grant}") for _ in range(3)]
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 4
    assert [code(answer) for answer in answers[1:]] == [(401, "grant_used")] * 2
    assert ask(engine, baggage=f"a=1, fleetkeeper-grant={KEY.grant()}").status_code == 200
    assert ask(engine, "/v1/models", Authorization=f"Bearer {KEY.grant()}").status_code == 200
    assert requests.get(engine.url + "/health", timeout=300).status_code == 200
    expected = {"missing": 3.0, "invalid": 6.0, "expired": 2.0, "used": 2.0}

    def counted() -> bool:
        after = refused(engine)
        return {name: after[name] - before[name] for name in after} == expected

    engine.wait_for(counted, f"refusals {expected}")
    # The supervisor's own requests need no grant.
    assert engine.health("ready") == 200
    assert "Bearer" not in engine.log
    assert grant not in engine.log


@pytest.mark.promise("grant-once")
def test_one_grant_sent_many_times_at_once_is_served_once(open_again: RunningEngine) -> None:
    engine = open_again
    put(engine, grants_text(KEY))
    header = f"Bearer {KEY.grant()}"
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(engine, Authorization=header), range(32)))
    assert Counter(answer.status_code for answer in answers) == {200: 1, 401: 31}


@pytest.mark.promise("grants", "grant-identity")
def test_the_tier_is_that_of_the_grant(open_again: RunningEngine) -> None:
    """The header may be anybody's."""
    engine = open_again
    put(engine, grants_text(KEY))

    def arrivals() -> list[float]:
        metrics = engine.metrics()
        return [
            metrics[f'fleetkeeper_arrivals_total{{tier="{tier}"}}']
            for tier in ("realtime", "standard", "batch")
        ]

    before = arrivals()
    granted = f"Bearer {KEY.grant(tier='batch')}"
    answer = ask(engine, Authorization=granted, X_Inference_Tier="realtime")
    assert answer.status_code == 200
    engine.wait_for(
        lambda: [b - a for a, b in zip(before, arrivals(), strict=True)] == [0, 0, 1],
        "one arrival of tier batch",
    )


class Clients:
    """Clients that send granted requests without a pause, through the gateway's own signer.

    They are replicas of a gateway: each reads changed keys later than the one before it.
    """

    def __init__(self, engine: RunningEngine, keys: Path, count: int = 3) -> None:
        self.statuses: Counter[int] = Counter()
        self.problems: list[str] = []
        self.kids: set[str] = set()
        self._engine = engine
        self._keys = keys
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(1.0 + 4.0 * number,))
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(GUARD_S)

    def _send(self, slowness: float) -> None:
        signer = Signer(KeyFiles(self._keys, time.time, lambda: time.monotonic() / slowness))
        service = Service("team", "chat", SERVICE, ("tiny",), "", True, "Ready", True, 0)
        number = 0
        while not self._stop.is_set():
            number += 1
            grant = signer.sign(
                service,
                tier=Tier.STANDARD,
                key_id="key-1",
                request_id=f"request-{number}",
                hops=1,
            )
            answer = ask(self._engine, Authorization=f"Bearer {grant}")
            with self._lock:
                self.statuses[answer.status_code] += 1
                self.kids.add(grant.split(".")[0])
                if answer.status_code != 200:
                    self.problems.append(answer.text)

    def used_keys(self, count: int) -> bool:
        """Return whether grants of so many keys were accepted."""
        return len(self.kids) >= count

    def more(self, count: int = 20) -> Callable[[], bool]:
        """Return a check that is true once so many more requests were answered."""
        target = self.statuses.total() + count
        return lambda: self.statuses.total() >= target


def trusts(engine: RunningEngine, kid: str) -> bool:
    """Return whether the engine has logged that it knows a key."""
    return kid in engine.log


def publish(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        draft = directory / f".{name}"
        draft.write_text(text)
        draft.replace(directory / name)


def file_text(files: dict[str, str], *, demanded: bool = True) -> str:
    keys = json.loads(files["jwks.json"])["keys"]
    return json.dumps({"demanded": demanded, "service": SERVICE, "keys": keys})


@pytest.mark.promise("signing-keys")
def test_keys_rotate_twice_under_load_without_a_failed_request(
    open_again: RunningEngine, tmp_path: Path
) -> None:
    """In the order that signFrom guarantees: engines trust a key before the gateway signs with it."""
    engine, files = open_again, new_grant_keys()
    publish(tmp_path, files)
    put(engine, file_text(files))
    with Clients(engine, tmp_path) as clients:
        now = time.time()
        for _ in range(2):
            engine.wait_for(clients.more(), "requests")
            seen = len(clients.kids)
            # The key before stays trusted: clients change to the new one at different times.
            files = rotated_grant_keys(files, sign_from=now - 1, now=now)
            new_kid = json.loads(files["jwks.json"])["keys"][0]["kid"]
            write_grants(engine.signer.directory, file_text(files))
            engine.wait_for(partial(trusts, engine, new_kid), "the new key")
            publish(tmp_path, files)
            engine.wait_for(partial(clients.used_keys, seen + 1), "the change")
        engine.wait_for(clients.more(), "requests")
    assert clients.problems == []
    assert len(clients.kids) == 3


def test_access_changes_under_load_without_a_failed_request(
    open_again: RunningEngine, tmp_path: Path
) -> None:
    """Granted requests pass all along, others while the service is open; nothing restarts."""
    engine, files = open_again, new_grant_keys()
    publish(tmp_path, files)
    pid = engine.vllm_process("APIServer").pid
    put(engine, file_text(files, demanded=False))
    with Clients(engine, tmp_path) as clients:
        for gateway in (True, False, True):
            engine.wait_for(clients.more(), "requests")
            put(engine, file_text(files, demanded=gateway))
            status = ask(engine).status_code
            assert status == (401 if gateway else 200)
        write_grants(engine.signer.directory, "{")
        engine.wait_for(lambda: "is invalid, grants" in engine.log, "a warning")
        assert ask(engine).status_code == 401
        engine.wait_for(clients.more(), "requests")
    assert clients.problems == []
    assert engine.vllm_process("APIServer").pid == pid
