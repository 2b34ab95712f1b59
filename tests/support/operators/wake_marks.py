"""An operator of a chart with the gateway, and the ConfigMap in which gateways write."""

from __future__ import annotations

from typing import Any

from fleetkeeper.adapters.keys import new_grant_keys
from fleetkeeper.adapters.kubernetes.resources import CHILDREN
from fleetkeeper.reconcile.types import Kind
from fleetkeeper_contract.sleep import GATEWAY_KEY, GATEWAY_VALUE
from tests.support.gateway.gateway_world import MARKS
from tests.support.operators.operator_process import OperatorProcess
from tests.support.operators.operator_world import World

CONFIG_MAP = CHILDREN[Kind.CONFIG_MAP]


def settings_with_marks(world: World) -> dict[str, str]:
    """Return the settings of an operator as a chart with the gateway makes them."""
    keys = world.directory / "grant-jwks.json"
    keys.write_text(new_grant_keys()["jwks.json"])
    return {"FLEETKEEPER_WAKE_MARKS": MARKS, "FLEETKEEPER_GRANT_JWKS_FILE": str(keys)}


async def operator_with_marks(world: World, **options: Any) -> OperatorProcess:
    """Start an operator as a chart with the gateway does."""
    return await world.operator(env=settings_with_marks(world), **options).start().leads()


async def mark(world: World, **marks: str) -> None:
    """Write marks as a gateway does, which shows that it can hold requests."""
    await world.patch(CONFIG_MAP, MARKS, {"data": {GATEWAY_KEY: GATEWAY_VALUE, **marks}})
