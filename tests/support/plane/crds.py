"""The CRD on a control plane."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from fleetkeeper.api.names import API_VERSION, PLURAL
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.guards import GUARD_S

CRDS: Final = Path(__file__).parents[3] / "crds"


def install_crds(plane: ControlPlane) -> None:
    """Apply the CRD, and return once the API server serves it.

    `kubectl wait` fails while the CRD has no condition yet, and an established kind answers 429 at first.
    """
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    deadline = time.monotonic() + GUARD_S
    while plane.get(f"/apis/{API_VERSION}/{PLURAL}") is None:
        assert time.monotonic() < deadline, "the API server does not serve InferenceServices"
        time.sleep(0.05)
