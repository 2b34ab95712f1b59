"""What the gateway refuses, and what its refusals say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http import request_shape
from fleetkeeper_engine.in_vllm.http.request_shape import Route, route_of
from fleetkeeper_gateway.http.paths import INFERENCE
from fleetkeeper_gateway.interfaces import Key, LimitRefused
from tests.gateway.http.world import AUTHORIZATION, CHAT, KEY, World, chat, head, service


def test_the_paths_are_those_of_the_engine() -> None:
    assert INFERENCE == request_shape._GENERATION | request_shape._TOKENIZER
    for path in INFERENCE:
        assert route_of("POST", path) in (Route.GENERATION, Route.TOKENIZER)


@pytest.mark.promise("strict-parser")
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"model": "m", "model": "m"}', "duplicate_field"),
        (b'{"model": "m", "mod\\u0065l": "other"}', "duplicate_field"),
        (b'{"model": "m", "n": 1, "n": 2}', "duplicate_field"),
        (b'{"prompt": "x"}', "missing_model"),
        (b'{"model": ""}', "missing_model"),
        (b'{"model": ["m"]}', "missing_model"),
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"m"', "invalid_json"),
        (b'{"model": "m"', "invalid_json"),
        (b'{"model": "m"} {}', "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        ('{"model": "m"}'.encode("utf-16"), "encoding_not_supported"),
        ('{"model": "m"}'.encode("utf-8-sig"), "encoding_not_supported"),
        (b'{"model": "m", "metadata": {"a": 1, "a": 2}}', "duplicate_field"),
        (b'{"model": "m", "x": NaN}', "invalid_json"),
        (b"model=m", "invalid_json"),
        (b'{"model": "m", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "too_deep"),
        (b'{"model": "m", "previous_response_id": "r"}', "stateful_responses_not_supported"),
    ],
)
async def test_an_unclear_body_is_refused(world: World, body: bytes, code: str) -> None:
    assert await world.refused(body) == (400, code)
    assert world.upstream.received == []
    assert world.limiter.admissions == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "previous_response_id": null, "max_tokens": "many", "n": -1}',
        b'\n{"model": "m", "big": 123456789012345678901234567890}\n',
    ],
)
async def test_what_the_gateway_need_not_understand_is_left_to_the_engine(
    world: World, body: bytes
) -> None:
    async with world.post(body) as response:
        assert response.status == 200
    assert world.upstream.received[0].body == body


@pytest.mark.parametrize("long", [False, True])
async def test_a_large_body_is_read_as_a_small_one(world: World, long: bool) -> None:
    text = "x" * (200_000 if long else 1)
    assert await world.refused(chat(a=text)[:-1] + b', "model": "m"}') == (400, "duplicate_field")
    assert await world.refused(json.dumps({"prompt": text}).encode()) == (400, "missing_model")
    assert await world.refused(chat(a=text, model=" m")) == (404, "model_not_found")
    assert await world.refused(chat(a=text, model="m" * 257)) == (400, "missing_model")
    assert await world.refused(b"\xef\xbb\xbf" + chat(a=text)) == (400, "encoding_not_supported")
    async with world.post(chat(a=text, max_tokens=5, n=2, tokens=list(range(9)))) as response:
        assert response.status == 200
    size = len(world.upstream.received[0].body)
    assert world.limiter.admissions[0].demand.tokens == size // 4 + 10


async def test_a_large_body_of_many_values_is_refused(world: World) -> None:
    assert await world.refused(chat(a=[{}] * 400_000)) == (400, "too_many_values")


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT, {"max_completion_tokens": 8, "max_tokens": 1}, 8),
        ("/v1/responses", {"max_output_tokens": 8}, 8),
        (CHAT, {"max_tokens": -5}, 0),
        (CHAT, {"max_tokens": 2, "n": 10**12}, 2 * 10**6),
        ("/v1/embeddings", {"max_tokens": 8}, 0),
    ],
)
async def test_the_estimate_counts_the_answer_that_is_asked_for(
    world: World, path: str, fields: dict[str, Any], tokens: int
) -> None:
    async with world.post(chat(**fields), path) as response:
        assert response.status == 200
    assert world.limiter.admissions[0].demand.tokens == len(chat(**fields)) // 4 + tokens


@pytest.mark.parametrize(
    ("highest", "named", "tier"),
    [
        (Tier.REALTIME, None, "standard"),
        (Tier.STANDARD, None, "standard"),
        (Tier.BATCH, None, "batch"),
        (Tier.REALTIME, " RealTime ", "realtime"),
        (Tier.STANDARD, "batch", "batch"),
    ],
)
async def test_the_tier_is_the_one_asked_for_or_the_default(
    world: World, highest: Tier, named: str | None, tier: str
) -> None:
    world.keys.known[AUTHORIZATION] = Key("k", "k", None, highest=highest)
    headers = {} if named is None else {"X_Inference_Tier": named}
    async with world.post(None, CHAT, **headers) as response:
        assert response.status == 200
    assert world.upstream.received[0].values("x-inference-tier") == [tier]
    assert world.limiter.admissions[0].demand.tier.label == tier


async def test_a_tier_that_the_key_may_not_use_is_refused_with_the_reason(world: World) -> None:
    async with world.post(X_Inference_Tier="realtime") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (403, "tier_not_allowed")
    assert "standard" in error["message"]
    assert await world.refused(X_Inference_Tier="urgent") == (400, "unknown_tier")


@pytest.mark.promise("key-namespaces")
async def test_a_model_that_is_unknown_looks_like_one_that_is_forbidden(world: World) -> None:
    world.services.set(
        service("other", world.upstream.url, namespace="others"),
        service("secret", world.upstream.url, models=("secret",)),
    )
    world.keys.known[AUTHORIZATION] = Key("k", "k", frozenset({"team"}), models=("m*",))
    answers = []
    for model in ("m", "secret", "unknown"):
        async with world.post(json.dumps({"model": model}).encode()) as response:
            text = (await response.text()).replace(f"'{model}'", "MODEL")
            headers = sorted(name.lower() for name in response.headers)
            answers.append((response.status, text, headers))
    assert answers[0][0] == 404
    assert answers[0] == answers[1] == answers[2]


async def test_a_model_of_several_services_needs_the_name_of_one(world: World) -> None:
    forbidden = service("c", namespace="others")
    world.services.set(service("a"), service("b", world.upstream.url), forbidden)
    async with world.post() as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "ambiguous_model")
    assert "team/a, team/b" in error["message"]
    assert "others" not in error["message"]
    async with world.post(X_Fleetkeeper_Service="team/b") as response:
        assert response.status == 200
    assert await world.refused(X_Fleetkeeper_Service="others/c") == (404, "model_not_found")
    world.services.set(service("b", world.upstream.url), forbidden)
    async with world.post() as response:
        assert response.status == 200


async def test_a_key_that_is_refused_never_reaches_the_limits(world: World) -> None:
    assert await world.refused(Authorization="Bearer other") == (401, "invalid_api_key")
    async with world.client.post(world.url(CHAT), data=chat()) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.headers["X-Fleetkeeper-Refused"] == "missing_api_key"
        assert (await response.json())["error"]["code"] == "missing_api_key"
    assert world.limiter.admissions == []
    assert world.upstream.received == []


async def test_a_limit_that_is_reached_is_answered_with_the_time_to_wait(world: World) -> None:
    world.limiter.refusal = LimitRefused(
        "tokens", "100 tokens a minute are used.", 17, {"x-ratelimit-limit-tokens": "100"}
    )
    async with world.post() as response:
        error = (await response.json())["error"]
        assert response.status == 429
        assert response.headers["Retry-After"] == "17"
        assert response.headers["x-ratelimit-limit-tokens"] == "100"
        assert response.headers["X-Fleetkeeper-Refused"] == "rate_limit_exceeded"
    assert (error["code"], error["limit"]) == ("rate_limit_exceeded", "tokens")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/metrics", 404, "unknown_path"),
        ("GET", "/health", 404, "unknown_path"),
        ("POST", "/v1/audio/transcriptions", 404, "unknown_path"),
        ("POST", "/v1/load_lora_adapter", 404, "unknown_path"),
        ("POST", CHAT + "/", 404, "unknown_path"),
        ("POST", "//v1/chat/completions", 404, "unknown_path"),
        ("POST", "/v1/../v1/chat/completions", 404, "unknown_path"),
        ("GET", "/v1/responses/r1", 400, "stateful_responses_not_supported"),
        ("POST", "/v1/responses/r1/cancel", 400, "stateful_responses_not_supported"),
    ],
)
async def test_other_paths_and_methods_are_refused(
    world: World, method: str, path: str, status: int, code: str
) -> None:
    raw = head("Content-Length: 0", path=path).replace(b"POST", method.encode(), 1)
    reader, writer = await world.raw(raw)
    assert int((await reader.readline()).split()[1]) == status
    answered = await reader.readuntil(b"}}")
    writer.close()
    assert f'"code": "{code}"'.encode() in answered
    assert world.upstream.received == []


async def test_an_encoded_path_is_the_path_that_it_encodes(world: World) -> None:
    assert (
        await world.raw_status(
            head(f"Content-Length: {len(chat())}", path="/v1/%63hat/completions") + chat()
        )
        == 200
    )
    assert world.upstream.received[0].path == CHAT


async def test_a_compressed_body_is_refused(world: World) -> None:
    assert await world.refused(Content_Encoding="gzip") == (415, "encoding_not_supported")


async def test_before_keys_and_services_are_known_nothing_is_refused_for_good(
    world: World,
) -> None:
    world.services.synced = False
    assert await world.refused() == (503, "starting")
    async with world.client.get(world.admin_url("/healthz/ready")) as response:
        assert response.status == 503
    world.services.synced = True
    async with world.client.get(world.admin_url("/healthz/ready")) as response:
        assert response.status == 200


async def test_models_are_listed_with_their_state(world: World) -> None:
    world.services.set(
        service("a", models=("m", "adapter"), state="Suspended", ready=False),
        service("b", models=("m",), created=5),
        service("c", models=("other",), namespace="others"),
    )
    auth = {"Authorization": AUTHORIZATION}
    async with world.client.get(world.url("/v1/models"), headers=auth) as response:
        listed = await response.json()
    assert [one["id"] for one in listed["data"]] == ["adapter", "m"]
    assert listed["data"][1] == {
        "id": "m",
        "object": "model",
        "created": 5,
        "owned_by": "fleetkeeper",
        "state": "Ready",
        "services": [
            {"service": "team/b", "state": "Ready", "ready": True},
            {"service": "team/a", "state": "Suspended", "ready": False},
        ],
    }
    async with world.client.get(world.url("/v1/models/adapter"), headers=auth) as response:
        assert await response.json() == listed["data"][0]
    async with world.client.get(world.url("/v1/models/other"), headers=auth) as response:
        assert (await response.json())["error"]["code"] == "model_not_found"
    async with world.client.get(world.url("/v1/models")) as response:
        assert response.status == 401


async def test_each_request_is_in_the_audit_log(world: World) -> None:
    async with world.post():
        pass
    await world.refused(X_Inference_Tier="realtime")
    await world.refused(json.dumps({"model": "a text of the client"}).encode())
    served, tier, model = world.audit.requests
    assert served == {
        "key_id": KEY.id,
        "request_id": served["request_id"],
        "service": "team/chat",
        "model": "m",
        "tier": "standard",
        "outcome": "ok",
        "status": 200,
        "client": "127.0.0.1",
    }
    assert (tier["outcome"], tier["status"], tier["key_id"]) == ("tier_not_allowed", 403, KEY.id)
    assert (model["outcome"], model["model"]) == ("model_not_found", None)
