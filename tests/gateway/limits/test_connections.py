"""How the gateway reaches Redis: TLS, users, and passwords that change."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from fleetkeeper_gateway.limits import LimitSettings
from tests.support.docs_commands import ROOT
from tests.support.gateway.limits_world import Replicas, demand_of, key_with, until
from tests.support.services.redis_server import RedisServer, RedisTls, redis_server

PREFIX = "FLEETKEEPER_GATEWAY_"
PAGE = ROOT / "docs" / "gateway-limits.md"
RIGHTS = "~fleetkeeper:limits:* +@connection +@scripting +@read +@write +time -@dangerous"
"""Of the gateway's user, as the page names them."""


async def test_tls_is_verified_against_the_ca_file(replicas: Replicas, tmp_path: Path) -> None:
    tls = RedisTls(tmp_path / "ours")
    another = RedisTls(tmp_path / "another").ca_file
    with redis_server(tmp_path / "redis", *tls.options):
        url = tls.url
        good = replicas.start(LimitSettings(redis_url=url, redis_ca_file=tls.ca_file))
        await good.until_shared()
        await good.limiter.admit(demand_of(key_with(requests=1)))
        assert good.shares
        with capture_logs() as logs:
            bad = [
                replicas.start(LimitSettings(redis_url=url, redis_ca_file=file))
                for file in (another, None)
            ]
            for each in bad:
                await until(lambda each=each: each.value("redis_failures_total") >= 2, "refused")  # type: ignore[misc]
                assert not each.shares
        assert "certificate verify failed" in str(logs)


async def test_user_and_password_come_from_a_file_that_is_read_again(
    redis: RedisServer, replicas: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("first-secret\n")
    monkeypatch.setenv(f"{PREFIX}REDIS_URL", redis.url)
    monkeypatch.setenv(f"{PREFIX}REDIS_USERNAME", "gateway")
    monkeypatch.setenv(f"{PREFIX}REDIS_PASSWORD_FILE", str(file))
    monkeypatch.setenv(f"{PREFIX}REDIS_CA_FILE", "")
    with redis.client() as client, capture_logs() as logs:
        rights = (*RIGHTS.split(), "on")
        client.execute_command("ACL", "SETUSER", "gateway", *rights, ">first-secret")
        replica = replicas.start(LimitSettings())
        await replica.until_shared()
        admission = await replica.limiter.admit(demand_of(key_with(1, 100, 1)))
        await admission.release(sent=True)
        client.execute_command("ACL", "SETUSER", "gateway", "resetpass", ">second-secret")
        client.client_kill_filter(user="gateway")
        await until(lambda: replica.value("redis_failures_total") >= 2, "the old one is refused")
        assert not replica.shares
        file.write_text("second-secret\n")
        await replica.until_shared()
    assert "secret" not in str(logs)
    assert RIGHTS in PAGE.read_text()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"redis_url": "http://redis:6379"}, "must be redis://"),
        ({"redis_url": "redis://:hunter2@redis?ssl=maybe"}, "no options"),
        ({"redis_url": "redis://:hunter2@redis", "redis_password_file": "/a"}, "beside"),
        ({"redis_url": "redis://redis", "redis_ca_file": "/a"}, "rediss://"),
        ({"redis_url": "redis://redis", "redis_username": "gateway"}, "needs REDIS_PASSWORD_FILE"),
    ],
)
def test_settings_that_cannot_work_are_refused_without_their_secrets(
    given: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint) as found:
        LimitSettings.model_validate(given)
    assert "hunter2" not in str(found.value)
