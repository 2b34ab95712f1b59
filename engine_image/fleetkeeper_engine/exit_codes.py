"""The classes of an engine's death and the exit code that tells each."""

from __future__ import annotations

import json
from enum import StrEnum

from fleetkeeper_engine.spec import CONTRACT


class DeathClass(StrEnum):
    """Why an engine ended. The operator turns these into condition reasons."""

    BAD_ENGINE_OPTION = "BadEngineOption"
    MODEL_NOT_FOUND = "ModelNotFound"
    UNSUPPORTED_ARCHITECTURE = "UnsupportedArchitecture"
    UNKNOWN = "Unknown"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    CUDA_OUT_OF_MEMORY = "CUDAOutOfMemory"
    HUNG = "Hung"
    MODEL_NOT_READABLE = "ModelNotReadable"


EXIT_CODES: dict[DeathClass, int] = {
    DeathClass.BAD_ENGINE_OPTION: 64,
    DeathClass.MODEL_NOT_FOUND: 66,
    DeathClass.UNSUPPORTED_ARCHITECTURE: 69,
    DeathClass.UNKNOWN: 70,
    DeathClass.HOST_OUT_OF_MEMORY: 71,
    DeathClass.CUDA_OUT_OF_MEMORY: 72,
    DeathClass.HUNG: 75,
    DeathClass.MODEL_NOT_READABLE: 77,
}
"""Close to sysexits.h; none is a code that Python, a shell or a signal gives by itself."""

MEANINGS: dict[DeathClass, str] = {
    DeathClass.BAD_ENGINE_OPTION: "The document or an engine option is wrong, or this CPU or GPU cannot run what it asks.",
    DeathClass.MODEL_NOT_FOUND: "There is no such directory, repository, revision or adapter.",
    DeathClass.UNSUPPORTED_ARCHITECTURE: "This vLLM does not know the model's architecture.",
    DeathClass.UNKNOWN: "The engine ended for a reason that its output does not tell.",
    DeathClass.HOST_OUT_OF_MEMORY: "The model does not fit into the pod's memory, by plan or by the kernel's verdict.",
    DeathClass.CUDA_OUT_OF_MEMORY: "The model or its cache does not fit into the accelerator's memory.",
    DeathClass.HUNG: "The engine had work and made no step for stallSeconds.",
    DeathClass.MODEL_NOT_READABLE: "The model's files are there but cannot be read: permission, gated repository, damaged file.",
}


def contract_files() -> dict[str, str]:
    """The generated table, by path from the repository's root."""
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
            "message": "one sentence: what was wrong, where, what to do",
            "detail": "up to 2048 bytes of the engine's last output",
        },
    }
    return {"engine_image/contract/exit-codes.json": json.dumps(table, indent=2) + "\n"}
