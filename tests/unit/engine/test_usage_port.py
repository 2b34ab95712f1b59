"""GET /v1/usage on the control port, without a vLLM."""

from __future__ import annotations

import json
import time
from pathlib import Path

from aiohttp.test_utils import TestClient, TestServer

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.shm.ledger import Entry, LedgerWriter, Tokens
from fleetkeeper_engine.shm.region import Region
from fleetkeeper_engine.spec import parse_document
from fleetkeeper_engine.supervisor.control_api.auth import Verifier
from fleetkeeper_engine.supervisor.control_api.server import ControlPort
from fleetkeeper_engine.supervisor.control_api.usage import UsagePort
from fleetkeeper_engine.supervisor.control_api.usage_auth import UsageVerifier
from fleetkeeper_engine.supervisor.memory.watch import MemoryState
from fleetkeeper_engine.supervisor.state import PodState
from tests.support.engine.grants import GrantKey

POD = "pod-uid"
DOCUMENT = {
    "contract": 1,
    "accelerator": "cpu",
    "model": {"source": "/m", "servedName": "m"},
    "batching": {"maxSequences": 64, "maxTokens": 2048},
}


async def _no_engine() -> bytes | None:
    return None


async def test_usage_is_served_with_a_token_and_a_ledger(tmp_path: Path) -> None:
    """401 without the token, 503 before the first ledger, and refusals are counted."""
    pod = PodState(
        parse_document(json.dumps(DOCUMENT)), Region.create(tmp_path / "region"), MemoryState(0.8)
    )
    key, verifier, ledger = GrantKey(), UsageVerifier(POD), tmp_path / "ledger"
    verifier.trust({str(key.jwk["kid"]): str(key.jwk["x"])})
    usage = UsagePort(verifier, ledger, "m")
    port = ControlPort(pod, Verifier(POD, "fleetkeeper"), _no_engine, usage)
    headers = {"Authorization": f"Bearer {key.usage_token(POD)}"}
    async with TestClient(TestServer(port.app())) as client:
        assert (await client.get("/v1/usage")).status == 401
        assert pod.control_answers[401] == 1
        assert (await client.get("/v1/usage", headers=headers)).status == 503
        ledger.write_bytes(b"no ledger")
        assert (await client.get("/v1/usage", headers=headers)).status == 503
        writer = LedgerWriter.open(ledger)
        writer.write(Entry(Tokens(1, 0, 2), time.time(), "a", "r", "k", tier=Tier.BATCH))
        page = await (await client.get("/v1/usage", headers=headers)).json()
        assert [entry["key"] for entry in page["entries"]] == ["k"]
        assert (await client.get("/v1/usage?after=", headers=headers)).status == 422
        writer.close()
