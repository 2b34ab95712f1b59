"""What may change while an engine runs, without orders: queue limits, batch's part, the objective.

The document says it for the start. `policy.json` beside the control keys, which a changed ConfigMap
brings into the running pod, says it from then on; without that file the document holds.
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
    # A newer operator may say more than this engine knows; what it knows must be right.
    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    tiers: Tiers = Tiers()
    objectives: Objectives = Objectives()


def policy_of(tiers: Tiers, objectives: Objectives) -> Policy:
    """The policy that these sections mean."""
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
    """What the document says."""
    return policy_of(document.tiers, document.objectives)


def read_policy(directory: Path) -> Policy | None:
    """The policy in a mounted directory; None when the file is not there.

    Raises:
        ValueError: when the file is there and wrong.
        OSError: when it cannot be read.
    """
    file = directory / POLICY_FILE
    return parse_policy(file.read_text()) if file.exists() else None


def parse_policy(text: str) -> Policy:
    """The policy in the file's text.

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
