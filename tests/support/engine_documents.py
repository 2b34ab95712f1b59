"""Documents of engines that no test starts."""

from __future__ import annotations

import json
from typing import Any

from fleetkeeper_engine.spec import DType, EngineDocument, parse_document
from fleetkeeper_engine.supervisor.launch.argv import Launch

A_LAUNCH = Launch(
    python="/usr/bin/python3",
    entry="vllm.entrypoints.openai.api_server",
    model="/models/m",
    adapters={},
    dtype=DType.FLOAT32,
    lora_rank=8,
    max_length=32_768,
    region="/dev/shm/fleetkeeper/shared-memory",
    package_path="/opt/own",
    internal_token="secret-mark",
    threads=4,
)
"""What is known of a machine and a model that no test has."""


def a_document(**sections: Any) -> EngineDocument:
    """A document for a CPU engine with these sections."""
    return parse_document(
        json.dumps(
            {
                "contract": 1,
                "accelerator": "cpu",
                "model": {"source": "/models/m", "servedName": "chat"},
                **sections,
            }
        )
    )
