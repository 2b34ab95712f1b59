"""Tiers and objectives change under a real vLLM, by a file as a ConfigMap brings it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.engine.supervised_engine import RunningEngine


def _put(directory: Path, text: str) -> None:
    # As the kubelet does: the whole file is there at once.
    draft = directory / ".policy"
    draft.write_text(text)
    draft.replace(directory / "policy.json")


def test_a_changed_policy_is_followed_without_a_restart(engine: RunningEngine) -> None:
    """Its queue limits hold, a wrong file changes nothing, and without the file the document holds again."""

    def policy() -> dict[str, object]:
        token = engine.signer.token(engine.uid)
        found: dict[str, object] = engine.limits("GET", token).json()["policy"]
        return found

    before, pid = policy(), engine.process.pid
    assert before["queueLimits"] == [64, 256, 1024]
    wanted = {
        "tiers": {
            "realtime": {"queueLimit": 3},
            "standard": {"queueLimit": 4},
            "batch": {"queueLimit": 5, "sharePercent": 40, "floorPercent": 10},
        },
        "objectives": {"queueWaitMilliseconds": 750, "batchTimeMilliseconds": 50},
    }
    file = engine.signer.directory / "policy.json"
    try:
        _put(file.parent, json.dumps(wanted))
        engine.wait_for(lambda: policy()["queueLimits"] == [3, 4, 5], "the new limits")
        assert policy() == {
            "queueLimits": [3, 4, 5],
            "batchShareRatio": 0.4,
            "batchFloorRatio": 0.1,
            "queueWaitObjectiveSeconds": 0.75,
        }
        _put(file.parent, "{")
        engine.wait_for(lambda: "policy.json" in engine.log, "a warning about it")
        assert policy()["queueLimits"] == [3, 4, 5]
    finally:
        file.unlink(missing_ok=True)
    engine.wait_for(lambda: policy() == before, "the document's policy")
    assert engine.process.pid == pid
    assert engine.complete(1).status_code == 200
