"""Which Redis the queue uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from fleetkeeper_gateway.batch.queue import create_queue
from fleetkeeper_gateway.batch.settings import BatchSettings
from fleetkeeper_gateway.limits import LimitSettings
from tests.gateway.batch.queue.world import KEY, World, up
from tests.support.services.redis_server import redis_server


def created(batch_url: str, limits_url: str) -> None:
    create_queue(
        BatchSettings(batch_redis_url=SecretStr(batch_url)),
        LimitSettings(redis_url=SecretStr(limits_url)),
        "one",
    )


def test_a_queue_without_redis_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="FLEETKEEPER_GATEWAY_BATCH_REDIS_URL"):
        created("", "")


def test_a_malformed_address_is_refused_without_its_password() -> None:
    with pytest.raises(ValidationError) as refused:
        created("http://:secret@host", "redis://other")
    assert "secret" not in str(refused.value)


async def test_the_password_and_user_of_the_limits_are_used(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("of-a-test\n")
    options = ("--user", "batch", "on", ">of-a-test", "~fleetkeeper:*", "+@all")
    with redis_server(tmp_path / "redis", *options) as server:
        world = World(server)
        queue = world.begin("one", redis_username="batch", redis_password_file=str(password))
        await up(queue)
        await world.submit(queue, 2)
        assert len(await queue.take(KEY, 3)) == 2
        await world.close()
