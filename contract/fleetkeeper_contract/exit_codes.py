"""Classes of an engine's end, and the exit code of each."""

from __future__ import annotations

from enum import StrEnum


class DeathClass(StrEnum):
    """The reason for which an engine ended. The operator maps it to a condition reason."""

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
"""Close to sysexits.h. None is a code that Python, a shell or a signal produces by itself."""
