"""The admission policy in force: queue limits, the shares of batch, and the queue wait objective.

The document sets the policy at the start. `policy.json` beside the control keys replaces it. A
changed ConfigMap brings that file into the running pod. Without the file the document applies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from fleetkeeper_engine.policy import Policy
from fleetkeeper_engine.spec import EngineDocument, Objectives, Tiers

POLICY_FILE: Final = "policy.json"


class _PolicyFile(BaseModel):
    # A newer operator may send more fields than this engine knows. The known ones must be valid.
    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    tiers: Tiers = Tiers()
    objectives: Objectives = Objectives()


def policy_of(tiers: Tiers, objectives: Objectives) -> Policy:
    """Return the policy of these sections."""
    return Policy(
        queue_limits=(
            tiers.realtime.queue_limit,
            tiers.standard.queue_limit,
            tiers.batch.queue_limit,
        ),
        batch_share_ratio=tiers.batch.share_percent / 100,
        batch_floor_ratio=tiers.batch.floor_percent / 100,
        queue_wait_objective_s=objectives.queue_wait_milliseconds / 1000,
    )


def start_policy(document: EngineDocument) -> Policy:
    """Return the document's policy."""
    return policy_of(document.tiers, document.objectives)


def read_policy(directory: Path) -> Policy | None:
    """Return the policy in a mounted directory; None if the file does not exist.

    Raises:
        ValueError: if the file exists and is wrong.
        OSError: if it cannot be read.
    """
    file = directory / POLICY_FILE
    return parse_policy(file.read_text()) if file.exists() else None


def parse_policy(text: str) -> Policy:
    """Return the policy in the file's text.

    Raises:
        ValueError: naming every wrong field.
    """
    try:
        found = _PolicyFile.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or POLICY_FILE}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        )
        raise ValueError(wrong) from None
    return policy_of(found.tiers, found.objectives)
