"""The rights that a user of Redis needs for the queue, as the docs name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.gateway.batch.queue.world import GUARD_S, PATIENT, World
from tests.support.docs_commands import ROOT
from tests.support.redis_server import RedisServer

PAGES = (ROOT / "docs" / "gateway-install.md", ROOT / "docs" / "gateway-limits.md")
LIMITS = "~fleetkeeper:limits:* +@connection +@scripting +@read +@write +time -@dangerous"
BATCHES = "~fleetkeeper:batch:* +info"


async def test_the_rights_on_the_pages_are_enough(
    redis: RedisServer, world: World, tmp_path: Path
) -> None:
    """For every command: lines are taken, renewed and recorded, a batch ends, Redis is rebuilt."""
    password = tmp_path / "password"
    password.write_text("of-a-test\n")
    with redis.client() as client:
        rights = (*LIMITS.split(), *BATCHES.split(), "on", ">of-a-test")
        client.execute_command("ACL", "SETUSER", "gateway", *rights)
        queue = world.begin(
            "one",
            replace(PATIENT, retry_s=0.02),
            redis_username="gateway",
            redis_password_file=str(password),
        )
        await queue.until_up(GUARD_S)
        record = await world.submit(queue, 4)
        assert await queue.leads("a lease")
        taken = await queue.take({"*": 3}, 0)
        assert await queue.renew(taken) == set(), "no lease is lost"
        await queue.give_back(taken[2:], attempt_counts=False)
        await world.finish(queue, taken[:2])
        assert len(await world.drain(queue)) == 2
        await queue.resign("a lease")
        await queue.remove(record)
        before = world.rebuilds()
        client.flushall()
        await world.until_reset(queue, before + 1)
        assert client.acl_log() == []
    installs, limits = (page.read_text() for page in PAGES)
    assert LIMITS in limits
    assert BATCHES in installs
