"""Records that Redis keeps are read by older and newer processes."""

from __future__ import annotations

import json
from dataclasses import asdict

from fleetkeeper_gateway.batch.queue.records import record_of
from tests.gateway.batch.queue.world import batch_of


def test_a_field_of_a_newer_process_is_ignored() -> None:
    """During an upgrade both kinds take lines of the same batch."""
    record = batch_of()
    assert record_of(json.dumps({**asdict(record), "added_later": 1})) == record
