"""Documents of engines that no test starts."""

from __future__ import annotations

import json
from typing import Any

from fleetkeeper_engine.spec import EngineDocument, parse_document


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
