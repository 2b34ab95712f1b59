"""The grants that an engine demands: every way one can be wrong, used once, and demanded while it runs."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from fleetkeeper_contract.grants import MAX_GRANT_BYTES
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.grants_file import GrantsFile, parse_grants
from fleetkeeper_engine.in_vllm.http.asgi import Receive, Scope, Send
from fleetkeeper_engine.in_vllm.http.grants import gate
from fleetkeeper_engine.in_vllm.http.grants.gate import GrantGate
from fleetkeeper_engine.in_vllm.http.grants.identity import GrantIdentity, identity_of
from fleetkeeper_engine.in_vllm.http.grants.refusals import GrantRefusedError
from fleetkeeper_engine.in_vllm.http.grants.used import UsedGrants
from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware
from fleetkeeper_engine.in_vllm.vllm_settings import INTERNAL_HEADER
from fleetkeeper_engine.shm.layout import GrantRefusal
from fleetkeeper_engine.shm.region import Region
from tests.support.engine.grants import (
    SERVICE,
    GrantKey,
    baggage,
    bearer,
    grants_text,
    write_grants,
)
from tests.support.engine.middleware_calls import (
    Call,
    StandInVllm,
    assert_nothing_left,
    running_middleware,
)
from tests.support.engine.no_descriptors import no_file_can_be_opened

NOW = int(time.time())


def fixed() -> float:
    """The time of every grant here, so that none expires while a slow host tests it."""
    return float(NOW)


KEY, OTHER = GrantKey(fixed), GrantKey(fixed)


class Noting(StandInVllm):
    """A stand-in for vLLM that keeps the scopes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await super().__call__(scope, receive, send)


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "wall_clock", fixed)


@pytest.fixture
def vllm() -> Noting:
    return Noting()


@pytest.fixture
def app(tmp_path: Path, vllm: Noting) -> Iterator[TierMiddleware]:
    with running_middleware(vllm, **settings(tmp_path, grants_text(KEY))) as made:
        yield made


def settings(directory: Path, text: str, **more: Any) -> dict[str, Any]:
    return {"grants_file": str(write_grants(directory, text)), **more}


async def asked(app: TierMiddleware, headers: list[tuple[bytes, bytes]], **scope: Any) -> Any:
    status, _, body = await Call(app, headers=headers, **scope).answer()
    return status if status == 200 else (status, body["error"]["code"])


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY.grant(tier="batch")),
        baggage(KEY.grant(tier="batch")),
        baggage(KEY.grant(tier="batch"), before="a=1;p=2, "),
        [(b"baggage", b"a=1"), *baggage(KEY.grant(tier="batch"))],
        [(b"authorization", b"Bearer of-the-router"), *baggage(KEY.grant(tier="batch") + ";x=1")],
    ],
    ids=["bearer", "baggage", "baggage of others", "two headers", "another bearer"],
)
async def test_a_valid_grant_passes_and_says_who_asks(
    app: TierMiddleware, vllm: Noting, headers: list[tuple[bytes, bytes]]
) -> None:
    """The tier is the grant's, whatever the header says."""
    assert await asked(app, [(b"x-inference-tier", b"realtime"), *headers]) == 200
    (scope,) = vllm.scopes
    identity = identity_of(scope)
    assert identity is not None
    assert (identity.request, identity.key, identity.tier) == ("request-1", "key-1", Tier.BATCH)
    assert b"authorization" not in dict(scope["headers"])
    assert app._admission.arrivals.total == [0, 0, 1]


WRONG: dict[str, tuple[str, str]] = {
    "another key": (OTHER.grant(), "grant_invalid"),
    "another key under our name": (OTHER.grant(header={"kid": KEY.jwk["kid"]}), "grant_invalid"),
    "no kid": (KEY.grant(header={"kid": None}), "grant_invalid"),
    "another type": (KEY.grant(header={"typ": "JWT"}), "grant_invalid"),
    "a usage token": (KEY.usage_token(SERVICE), "grant_invalid"),
    "another service": (KEY.grant(aud="other"), "grant_invalid"),
    "two services": (KEY.grant(aud=[SERVICE, "other"]), "grant_invalid"),
    "no service": (KEY.grant(aud=None), "grant_invalid"),
    "another issuer": (KEY.grant(iss="somebody"), "grant_invalid"),
    "expired": (KEY.grant(iat=NOW - 200, exp=NOW - 150), "grant_expired"),
    "no end": (KEY.grant(exp=None), "grant_invalid"),
    "valid for too long": (KEY.grant(exp=NOW + 90), "grant_invalid"),
    "ends before it begins": (KEY.grant(exp=NOW - 1), "grant_invalid"),
    "from the future": (KEY.grant(iat=NOW + 3600, exp=NOW + 3660), "grant_invalid"),
    "time as text": (KEY.grant(iat=str(NOW)), "grant_invalid"),
    "time as truth": (KEY.grant(iat=True), "grant_invalid"),
    "no attempt": (KEY.grant(jti=None), "grant_invalid"),
    "short attempt": (KEY.grant(jti="1"), "grant_invalid"),
    "no request": (KEY.grant(rid=None), "grant_invalid"),
    "no client key": (KEY.grant(key=None), "grant_invalid"),
    "unknown tier": (KEY.grant(tier="vip"), "grant_invalid"),
    "tier of another type": (KEY.grant(tier=["batch"]), "grant_invalid"),
    "too many gateways": (KEY.grant(hops=4), "grant_invalid"),
    "no gateway": (KEY.grant(hops=0), "grant_invalid"),
    "hops as truth": (KEY.grant(hops=True), "grant_invalid"),
    "too long": (KEY.grant(key="k" * MAX_GRANT_BYTES), "grant_invalid"),
    "not a token": ("sk-123", "grant_invalid"),
    "three words": ("a.b.c", "grant_invalid"),
    "not signed": (
        jwt.encode({"aud": SERVICE}, "", algorithm="none", headers={"kid": KEY.jwk["kid"]}),
        "grant_invalid",
    ),
    "signed with the public key as a password": (
        jwt.encode(
            {"aud": SERVICE},
            KEY.jwk["x"],
            algorithm="HS256",
            headers={"kid": KEY.jwk["kid"], "typ": "fleetkeeper-grant+jwt"},
        ),
        "grant_invalid",
    ),
}


@pytest.mark.promise("grant-once", "grant-audience")
@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_grant_is_refused_before_it_costs_anything(
    app: TierMiddleware, vllm: Noting, name: str
) -> None:
    grant, code = WRONG[name]
    for headers in (bearer(grant), baggage(grant)):
        assert await asked(app, headers) == (401, code)
    assert vllm.scopes == []
    assert app._grants.refused[GrantRefusal[code.removeprefix("grant_").upper()]] == 2
    assert_nothing_left(app)


def test_a_grant_passes_within_the_clocks_difference(tmp_path: Path) -> None:
    """Five seconds to either side, and not more."""
    file = write_grants(tmp_path, grants_text(KEY))
    found = GrantGate(str(file), "")

    def passes(**claims: Any) -> bool:
        try:
            return found.admit({"headers": bearer(KEY.grant(**claims))}) is not None
        except GrantRefusedError:
            return False

    assert passes(iat=NOW + 5, exp=NOW + 65)
    assert not passes(iat=NOW + 6, exp=NOW + 66)
    assert passes(iat=NOW - 65, exp=NOW - 5)
    assert not passes(iat=NOW - 66, exp=NOW - 6)


@pytest.mark.promise("grant-demanded")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/responses/resp_1"),
    ],
)
async def test_every_route_with_authorization_demands_a_grant_once(
    app: TierMiddleware, vllm: Noting, method: str, path: str
) -> None:
    grant = KEY.grant()
    assert await asked(app, [], method=method, path=path) == (401, "grant_missing")
    assert await asked(app, bearer(grant), method=method, path=path) == 200
    assert await asked(app, bearer(grant), method=method, path=path) == (401, "grant_used")
    assert await asked(app, baggage(grant), method=method, path=path) == (401, "grant_used")
    assert len(vllm.scopes) == 1
    assert_nothing_left(app)


async def test_a_router_may_have_the_prompt_tokenized_before_it_sends_the_request(
    app: TierMiddleware,
) -> None:
    """vllm-router does so with `cache_aware`, and passes the bearer token on. One generation, still."""
    header = bearer(KEY.grant())
    for path in ("/tokenize", "/detokenize"):
        assert await asked(app, header, path=path) == 200
        assert await asked(app, header, path=path) == (401, "grant_used")
    assert await asked(app, header, method="GET", path="/v1/responses/render") == 200
    assert await asked(app, header, method="GET", path="/v1/models") == (401, "grant_used")
    assert await asked(app, header, path="/v1/completions") == 200
    assert await asked(app, header, path="/v1/chat/completions") == (401, "grant_used")


async def test_probes_and_the_supervisor_need_no_grant(tmp_path: Path, vllm: Noting) -> None:
    own = [(INTERNAL_HEADER.encode(), b"token")]
    made = settings(tmp_path, grants_text(KEY), internal_token="token")
    with running_middleware(vllm, **made) as app:
        assert await asked(app, [], method="GET", path="/health") == 200
        assert await asked(app, own) == 200
        assert await asked(app, [(own[0][0], b"wrong")]) == (401, "grant_missing")


async def test_a_refused_request_leaves_its_grant_usable(tmp_path: Path, vllm: Noting) -> None:
    """A router sends it again with the same headers."""
    made = settings(tmp_path, grants_text(KEY), max_sequences=1, standard_queue_limit=0)
    with running_middleware(vllm, **made) as app:
        vllm.go.clear()
        running = [Call(app, headers=bearer(KEY.grant())) for _ in range(3)]
        await vllm.until_taken(3)
        grant = KEY.grant()
        for _ in range(3):
            assert await asked(app, bearer(grant)) == (429, "queue_full")
        vllm.go.set()
        for call in running:
            assert (await call.answer())[0] == 200
        assert await asked(app, bearer(grant)) == 200
        assert await asked(app, bearer(grant)) == (401, "grant_used")


async def test_a_bad_body_and_a_client_that_hangs_up_leave_the_grant_usable(
    app: TierMiddleware,
) -> None:
    grant = KEY.grant()
    status, _, _ = await Call(app, b'{"n": 1000, "prompt": "x"}', headers=bearer(grant)).answer()
    assert status == 422
    gone = Call(app, None, headers=bearer(grant))
    gone.feed(b"{")
    gone.hang_up()
    await gone.task
    assert await asked(app, bearer(grant)) == 200


async def test_of_requests_at_once_with_one_grant_a_single_one_passes(
    app: TierMiddleware, vllm: Noting
) -> None:
    """Also while the one that has it still sends its body, or waits in the queue."""
    vllm.go.clear()
    grant = KEY.grant()
    slow = Call(app, None, headers=bearer(grant))
    slow.feed(b'{"prompt"')
    await asyncio.sleep(0)
    assert await asked(app, bearer(grant)) == (401, "grant_used")
    slow.feed(b': "x"}', more=False)
    await vllm.until_taken(1)
    answers = await asyncio.gather(*(asked(app, bearer(grant)) for _ in range(50)))
    assert answers == [(401, "grant_used")] * 50
    vllm.go.set()
    assert (await slow.answer())[0] == 200
    assert len(vllm.scopes) == 1


async def test_vllm_gets_its_api_key_and_direct_clients_need_the_grant(
    tmp_path: Path, vllm: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-vllm")
    with running_middleware(vllm, **settings(tmp_path, grants_text(KEY))) as app:
        twice = [*bearer(KEY.grant()), (b"authorization", b"Bearer second")]
        assert await asked(app, twice) == 200
        sent = [value for name, value in vllm.scopes[0]["headers"] if name == b"authorization"]
        assert sent == [b"Bearer of-vllm"]
        assert await asked(app, bearer("of-vllm")) == (401, "grant_invalid")
        assert await asked(app, []) == (401, "grant_missing")


async def test_an_open_service_takes_grants_and_goes_without(
    tmp_path: Path, vllm: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing fails while access changes, and usage has a key before that."""
    monkeypatch.setenv("VLLM_API_KEY", "of-vllm")
    with running_middleware(vllm, **settings(tmp_path, grants_text(KEY, demanded=False))) as app:
        grant = KEY.grant(tier="realtime")
        assert await asked(app, bearer(grant)) == 200
        identity = identity_of(vllm.scopes[0])
        assert identity is not None
        assert identity.tier is Tier.REALTIME
        assert await asked(app, bearer("of-vllm")) == 200
        assert identity_of(vllm.scopes[1]) is None
        assert await asked(app, bearer(grant)) == (401, "invalid_api_key")
        assert await asked(app, bearer(OTHER.grant())) == (401, "invalid_api_key")
        assert app._grants.refused == [0, 0, 0, 0]


async def test_without_keys_a_demand_refuses_everything(tmp_path: Path, vllm: Noting) -> None:
    with running_middleware(vllm, **settings(tmp_path, grants_text())) as app:
        assert await asked(app, []) == (401, "grant_missing")
        assert await asked(app, bearer(KEY.grant())) == (401, "grant_invalid")


async def test_the_demand_changes_while_the_engine_idles(
    tmp_path: Path, vllm: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request comes; the tick reads the file, and the metric shows it."""
    monkeypatch.setattr(gate, "CHECK_PERIOD_S", 0.0)
    region = Region.create(tmp_path / "region")
    monkeypatch.setattr(Region, "of_environment", lambda: region)
    file = tmp_path / "grants.json"
    with running_middleware(vllm, grants_file=str(file)) as app:
        assert await asked(app, []) == 200

        await until_shown(region, grants_demanded=False)
        for text, demanded in (
            (grants_text(KEY), True),
            (grants_text(KEY, demanded=False), False),
            (grants_text(KEY), True),
            (None, False),
            (grants_text(OTHER), True),
        ):
            if text is None:
                file.unlink()
            else:
                write_grants(tmp_path, text)
            await until_shown(region, grants_demanded=demanded)
            expected = (401, "grant_missing") if demanded else 200
            assert await asked(app, []) == expected
        assert await asked(app, bearer(KEY.grant())) == (401, "grant_invalid")
        assert await asked(app, bearer(OTHER.grant())) == 200
        await until_shown(region, grants_refused=(3, 1, 0, 0))


async def until_shown(region: Region, **values: object) -> None:
    """Return once the shared block has these values; another process would read it the same way."""
    async with asyncio.timeout(60):
        while True:
            block = region.read_middleware()
            if block is not None and all(
                getattr(block, name) == value for name, value in values.items()
            ):
                return
            await asyncio.sleep(0.01)


HALF = [
    "",
    "{",
    "[]",
    '{"demanded": "yes", "service": "u", "keys": []}',
    '{"demanded": true, "keys": []}',
    '{"demanded": true, "service": "", "keys": []}',
    '{"demanded": false, "service": "u"}',
    '{"demanded": false, "service": "u", "keys": [{}]}',
    json.dumps({"demanded": False, "service": "u", "keys": [{**KEY.jwk, "d": "x"}]}),
    json.dumps({"demanded": False, "service": "u", "keys": [{**KEY.jwk, "x": "short"}]}),
    json.dumps({"demanded": False, "service": "u", "keys": [KEY.jwk, KEY.jwk]}),
    json.dumps({"demanded": False, "service": "u", "keys": [GrantKey().jwk for _ in range(4)]}),
]


@pytest.mark.parametrize("text", HALF)
def test_a_half_written_file_leaves_the_state_in_force_and_is_logged_once(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    moment = 0.0
    file = write_grants(tmp_path, grants_text(KEY))
    found = GrantGate(str(file), "", monotonic=lambda: moment)
    with caplog.at_level(logging.WARNING, "vllm.fleetkeeper"):
        for _ in range(3):
            moment += 10
            write_grants(tmp_path, text)
            assert found.refresh() is False
    assert found.demanded
    assert found.admit({"headers": bearer(KEY.grant())}) is not None
    assert [record for record in caplog.records if "grants.json" in record.message][1:] == []
    assert len(caplog.records) == 1
    moment += 10
    write_grants(tmp_path, grants_text(KEY, demanded=False))
    assert found.refresh() is True
    assert not found.demanded


def test_a_change_that_could_not_be_read_is_read_later(tmp_path: Path) -> None:
    """Else whoever opens enough connections at that moment keeps the service open."""
    moment = 0.0
    file = write_grants(tmp_path, grants_text(KEY, demanded=False))
    running = GrantGate(str(file), "", monotonic=lambda: moment)
    write_grants(tmp_path, grants_text(KEY))
    moment += 10
    with no_file_can_be_opened():
        assert running.refresh() is False
        starting = GrantGate(str(file), "", monotonic=lambda: moment)
    moment += 10
    assert running.refresh() is True
    assert running.demanded
    assert starting.demanded
    starting.refresh()
    assert starting.admit({"headers": bearer(KEY.grant())}) is not None


@pytest.mark.parametrize("text", HALF)
def test_an_engine_that_starts_on_an_invalid_file_stays_closed(tmp_path: Path, text: str) -> None:
    assert GrantGate(str(write_grants(tmp_path, text)), "").demanded


def test_an_engine_without_a_file_demands_nothing_and_loads_no_library_for_signatures(
    tmp_path: Path,
) -> None:
    code = (
        "import sys; from fleetkeeper_engine.in_vllm.http.middleware import TierMiddleware;"
        "from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings;"
        "app = TierMiddleware(None, VllmSettings(grants_file=sys.argv[1]));"
        "print(app._grants.demanded, sorted({'jwt', 'cryptography'} & set(sys.modules)))"
    )

    def shown() -> str:
        command = [sys.executable, "-c", code, str(tmp_path / "grants.json")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert shown() == "False []"
    write_grants(tmp_path, grants_text(KEY))
    assert shown() == "True ['cryptography', 'jwt']"


@pytest.mark.parametrize("demanded", [True, False])
def test_an_image_without_the_library_checks_no_grant_and_opens_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    demanded: bool,
) -> None:
    """An injected engine has the libraries of vLLM's image. A gateway must not end open services."""
    monkeypatch.setitem(sys.modules, "jwt", None)
    monkeypatch.delitem(
        sys.modules, "fleetkeeper_engine.in_vllm.http.grants.signatures", raising=False
    )
    moment = 0.0
    running = GrantGate(str(tmp_path / "grants.json"), "", monotonic=lambda: moment)
    file = write_grants(tmp_path, grants_text(KEY, demanded=demanded))
    moment += 10
    for found in (running, GrantGate(str(file), "")):
        with caplog.at_level(logging.ERROR, "vllm.fleetkeeper"):
            found.refresh()
        assert found.demanded is demanded
        scope = {"headers": bearer(KEY.grant())}
        if demanded:
            with pytest.raises(GrantRefusedError, match="knows no keys"):
                found.admit(scope)
        else:
            assert found.admit(scope) is None
    assert "jwt" in caplog.text


def identity(attempt: str, expires: float) -> GrantIdentity:
    return GrantIdentity(attempt, "r", "k", Tier.STANDARD, expires)


def test_the_memory_of_used_grants_is_bounded_and_forgets_none_that_is_valid() -> None:
    used = UsedGrants(max_remembered=3)
    for number in range(3):
        assert not used.is_full(0.0)
        claim = used.claim(identity(f"a{number}", 60.0 + number))
        assert claim is not None
        claim.use()
        claim.release()
    assert used.is_full(65.0)
    assert used.claim(identity("a0", 60.0)) is None
    assert not used.is_full(65.1)
    assert len(used) == 2
    claim = used.claim(identity("a3", 120.0))
    assert claim is not None
    claim.release()
    claim.release()
    assert len(used) == 2


async def test_a_full_memory_refuses_and_does_not_open(app: TierMiddleware) -> None:
    app._grants._used = UsedGrants(max_remembered=1)
    assert await asked(app, bearer(KEY.grant())) == 200
    assert await asked(app, bearer(KEY.grant())) == (429, "grants_full")


def test_fields_of_a_newer_operator_are_ignored() -> None:
    text = json.loads(grants_text(KEY))
    found = parse_grants(json.dumps({**text, "newer": 1}))
    assert found == GrantsFile(True, SERVICE, {KEY.jwk["kid"]: KEY.jwk["x"]})
