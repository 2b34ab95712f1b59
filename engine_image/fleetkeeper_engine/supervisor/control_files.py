"""Control keys and admission policy: files of a mounted ConfigMap, which may change while the pod runs."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from fleetkeeper_engine.supervisor.control_api.auth import Verifier, read_keys
from fleetkeeper_engine.supervisor.policy_file import POLICY_FILE, read_policy
from fleetkeeper_engine.supervisor.state import PodState

logger = logging.getLogger("fleetkeeper.control_files")

CONTROL_FILES_PERIOD_S = 5.0
"""The kubelet updates a mounted ConfigMap within a minute or two."""


class ControlFiles:
    """The files of one pod, with the problems that were already logged."""

    def __init__(self, verifier: Verifier, pod: PodState) -> None:
        self._directory = Path(pod.document.control.keys_directory)
        self._verifier = verifier
        self._pod = pod
        self._reported: list[str] = []

    def apply(self) -> None:
        """Apply what the files contain. What cannot be read leaves the current keys or policy in force."""
        directory = self._directory
        problems = []
        # A half-written ConfigMap must not lock the operator out.
        try:
            self._verifier.trust(read_keys(directory))
        except (OSError, ValueError) as error:
            problems.append(f"control keys in {directory} are invalid: {error}")
        try:
            policy = read_policy(directory)
        except (OSError, ValueError) as error:
            problems.append(f"{directory / POLICY_FILE} is invalid: {error}")
        else:
            if self._pod.apply_policy(policy, time.monotonic()):
                logger.info("admission policy changed: %s", self._pod.policy)
        for problem in problems:
            if problem not in self._reported:
                logger.warning("%s", problem)
        self._reported = problems
