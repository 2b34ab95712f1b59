"""Meanings of the exit codes, and their table for readers outside."""

from __future__ import annotations

import json

from fleetkeeper_contract.exit_codes import EXIT_CODES, DeathClass
from fleetkeeper_engine.spec import CONTRACT

MEANINGS: dict[DeathClass, str] = {
    DeathClass.BAD_ENGINE_OPTION: "The document or an engine option is wrong, or this CPU or GPU does not support it.",
    DeathClass.MODEL_NOT_FOUND: "The directory, repository, revision or adapter does not exist.",
    DeathClass.UNSUPPORTED_ARCHITECTURE: "This vLLM does not support the model's architecture.",
    DeathClass.UNKNOWN: "The engine ended for a reason that its output does not show.",
    DeathClass.HOST_OUT_OF_MEMORY: "The model does not fit into the pod's memory: refused by the memory plan, or OOM-killed.",
    DeathClass.CUDA_OUT_OF_MEMORY: "The model or its cache does not fit into the accelerator's memory.",
    DeathClass.HUNG: "The engine completed no step although requests were pending, or vLLM's API server did not answer, for stallSeconds.",
    DeathClass.MODEL_NOT_READABLE: "The model's files exist but cannot be read: permission, gated repository, damaged file.",
}


def contract_files() -> dict[str, str]:
    """Return the generated table, by path from the repository's root."""
    table = {
        "contract": CONTRACT,
        "drained": 0,
        "deaths": [
            {"class": str(death), "code": EXIT_CODES[death], "meaning": MEANINGS[death]}
            for death in DeathClass
        ],
        "terminationLine": {
            "class": "one of the classes above",
            "code": "the exit code",
            "phase": "document | plan | start | serve",
            "message": "one sentence: what happened, to which object, what to do",
            "detail": "up to 2048 bytes of the engine's last output",
        },
    }
    return {"engine_image/schemas/exit-codes.json": json.dumps(table, indent=2) + "\n"}
