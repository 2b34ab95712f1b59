"""The rights that a user of Redis needs for the queue, as the docs name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetkeeper_gateway.batch.interfaces import QueueDown
from tests.gateway.batch.queue.world import KEY, World, metric, until, up
from tests.support.docs_commands import ROOT
from tests.support.services.redis_server import RedisServer

PAGES = (ROOT / "docs" / "gateway-install.md", ROOT / "docs" / "gateway-limits.md")
LIMITS = "~fleetkeeper:limits:* +@connection +@scripting +@read +@write +time -@dangerous"
BATCHES = "~fleetkeeper:batch* +info"


async def test_the_rights_on_the_pages_are_enough(
    redis: RedisServer, world: World, tmp_path: Path
) -> None:
    """For every command, and without those for the keys the log says what to do."""
    password = tmp_path / "password"
    password.write_text("of-a-test\n")
    with redis.client() as client:
        client.execute_command("ACL", "SETUSER", "gateway", *LIMITS.split(), "+info", "on", ">of-a-test")  # fmt: skip
        before = metric("failures_total")
        queue = world.begin(redis_username="gateway", redis_password_file=str(password))
        await until(lambda: metric("failures_total") > before, "it was tried")
        with pytest.raises(QueueDown, match="give the user the rights for fleetkeeper:batch2:"):
            await queue.keys()
        client.execute_command("ACL", "SETUSER", "gateway", *BATCHES.split())
        await up(queue)
        client.acl_log_reset()
        record = await world.submit(queue, 4)
        assert await queue.leads("a lease")
        assert await queue.keys() == {KEY: 0}
        held = await queue.take(KEY, 3)
        assert await queue.renew(held, {KEY: 3}) == set(), "nothing is lost"
        await queue.give_back(held[:1])
        world.idle(held[1:2])
        assert await world.counts(queue, record) == (4, 1)
        await queue.release("one")
        for each in await queue.take(KEY, 9):
            await queue.done(each)
        assert await queue.emptied() == [record.id]
        await queue.resign("a lease")
        await queue.remove(record)
        assert client.acl_log() == []
    installs, limits = (page.read_text() for page in PAGES)
    assert LIMITS in limits
    assert BATCHES in installs
