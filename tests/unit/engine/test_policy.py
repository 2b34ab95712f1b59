"""Tiers and objectives change under a running engine: from a file, into shared memory, to the queue."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.reconcile.manifests.control_config import POLICY_FILE as OPERATORS_FILE
from fleetkeeper.reconcile.manifests.engine_document import desired_policy, document_text
from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.queue import Admission
from fleetkeeper_engine.in_vllm.http.admission.tickets import Refusal, Ticket
from fleetkeeper_engine.in_vllm.vllm_settings import VllmSettings
from fleetkeeper_engine.policy import Policy
from fleetkeeper_engine.shm.layout import Outcome, SupervisorBlock
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.policy_file import (
    POLICY_FILE,
    parse_policy,
    read_policy,
    start_policy,
)
from fleetkeeper_engine.supervisor.state import PodState
from tests.support.reconcile.random_specs import random_spec

DOCUMENT = parse_document(
    json.dumps(
        {
            "contract": 1,
            "accelerator": "cpu",
            "model": {"source": "/m", "servedName": "m"},
            "tiers": {"standard": {"queueLimit": 7}},
            "objectives": {"queueWaitMilliseconds": 250},
        }
    )
)
TIGHT = Policy(
    queue_limits=(1, 1, 0),
    batch_share_ratio=0.5,
    batch_floor_ratio=0.25,
    queue_wait_objective_s=2.0,
)


@pytest.fixture
def pod(tmp_path: Path) -> PodState:
    return PodState(DOCUMENT, Region.create(tmp_path / "region"), MemoryState(0.8))


def block(policy: Policy) -> SupervisorBlock:
    return SupervisorBlock(
        queue_limits=policy.queue_limits,
        batch_share_ratio=policy.batch_share_ratio,
        batch_floor_ratio=policy.batch_floor_ratio,
        queue_wait_objective_s=policy.queue_wait_objective_s,
    )


def waiting(queue: Admission, tier: Tier) -> Ticket | Refusal:
    refused = queue.refuse(tier, None, 1.0)
    return refused or queue.enqueue(tier, 1, 1.0, 1.0)


def test_until_a_file_says_otherwise_the_document_holds(pod: PodState) -> None:
    """And it holds again when the file goes away."""
    pod.write(1.0)
    assert pod.policy == start_policy(DOCUMENT)
    assert pod.policy.queue_limits == (64, 7, 1024)
    seen = pod.region.read_supervisor()
    assert seen is not None
    assert (seen.queue_limits, seen.queue_wait_objective_s) == ((64, 7, 1024), 0.25)
    assert pod.apply_policy(TIGHT, 2.0)
    assert not pod.apply_policy(TIGHT, 3.0), "the same again is no change"
    seen = pod.region.read_supervisor()
    assert seen == replace(block(TIGHT), written=2.0)
    assert pod.apply_policy(None, 4.0)
    assert pod.policy == start_policy(DOCUMENT)


def test_the_queue_follows_at_its_next_look_and_keeps_what_waits() -> None:
    """A lower limit refuses the next arrival and expels nobody; a region that cannot be read: start-up values."""
    queue = Admission(VllmSettings(max_sequences=1, standard_queue_limit=3))
    running = waiting(queue, Tier.STANDARD)
    assert queue.release_ready(1.0) == [running]
    for _ in range(2):
        assert isinstance(waiting(queue, Tier.STANDARD), Ticket)
    queue.apply_supervisor_block(block(TIGHT))
    refused = waiting(queue, Tier.STANDARD)
    assert isinstance(refused, Refusal)
    assert (refused.outcome, refused.limit) == (Outcome.QUEUE_FULL, 1)
    assert len(queue.tiers[Tier.STANDARD].queue) == 2
    queue.apply_supervisor_block(None)
    assert isinstance(waiting(queue, Tier.STANDARD), Ticket)


def test_share_floor_and_the_pods_own_rule_follow() -> None:
    queue = Admission(VllmSettings(max_sequences=16, queue_wait_objective_s=0.5))
    assert (queue.room(1.0).share_ratios[2], queue.room(1.0).batch_floor_ratio) == (0.3, 0.05)
    queue.apply_supervisor_block(block(TIGHT))
    assert (queue.room(1.0).share_ratios[2], queue.room(1.0).batch_floor_ratio) == (0.5, 0.25)
    queue.tick((0.0, 9.0, 0.0), 10.0)  # the oldest waits for 1 s: above 0.5, below 2
    assert not queue.own_rule_closed
    queue.apply_supervisor_block(SupervisorBlock())
    queue.tick((0.0, 9.0, 0.0), 10.0)
    assert queue.own_rule_closed


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
def test_the_engine_reads_what_the_operator_writes(rng: random.Random) -> None:
    """For any spec, and the file has the name that the engine looks for."""
    spec = InferenceServiceSpec.model_validate(random_spec(rng))
    found = parse_policy(document_text(desired_policy(spec)))
    assert found.queue_limits[Tier.BATCH] == spec.tiers.batch.queue_limit
    assert found.batch_share_ratio == spec.tiers.batch.share_percent / 100
    assert found.queue_wait_objective_s == spec.objectives.queue_wait_milliseconds / 1000
    assert OPERATORS_FILE == POLICY_FILE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"tiers": {"batch": {"queueLimit": -1}}}',
        '{"tiers": {"batch": {"queueLimit": 1, "sharePercent": 5, "floorPercent": 6}}}',
        '{"objectives": {"queueWaitMilliseconds": 0}}',
        '{"objectives": {"queueWaitMilliseconds": NaN}}',
    ],
)
def test_a_wrong_file_is_refused_whole(tmp_path: Path, text: str) -> None:
    (tmp_path / POLICY_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"\w"):
        read_policy(tmp_path)


def test_what_a_newer_operator_says_beyond_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / POLICY_FILE).write_text('{"objectives": {"queueWaitMilliseconds": 20}, "new": {}}')
    found = read_policy(tmp_path)
    assert found is not None
    assert found.queue_wait_objective_s == 0.02
    assert read_policy(tmp_path / "nowhere") is None
