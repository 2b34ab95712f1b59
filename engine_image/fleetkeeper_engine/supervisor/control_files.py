"""Control keys, admission policy and grant keys: files of a mounted ConfigMap, which may change while the pod runs."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from fleetkeeper_contract.grants import GRANTS_FILE
from fleetkeeper_engine.grants_file import parse_grants
from fleetkeeper_engine.supervisor.control_api.auth import KEYS_FILE, Verifier, read_keys
from fleetkeeper_engine.supervisor.control_api.usage_auth import UsageVerifier
from fleetkeeper_engine.supervisor.policy_file import POLICY_FILE, read_policy
from fleetkeeper_engine.supervisor.state import PodState

logger = logging.getLogger("fleetkeeper.control_files")

CONTROL_FILES_PERIOD_S = 5.0
"""The kubelet updates a mounted ConfigMap within a minute or two."""


class ControlFiles:
    """The files of one pod, with the problems that were already logged."""

    def __init__(self, verifier: Verifier, usage_verifier: UsageVerifier, pod: PodState) -> None:
        self._directory = Path(pod.document.control.keys_directory)
        self._verifier = verifier
        self._usage_verifier = usage_verifier
        self._pod = pod
        self._reported: list[str] = []

    def apply(self) -> None:
        """Apply what the files contain. What cannot be read leaves the current content in force.

        A half-written ConfigMap must not lock the operator out.
        """
        problems = []
        for name, apply in (
            (KEYS_FILE, self._apply_keys),
            (POLICY_FILE, self._apply_policy),
            (GRANTS_FILE, self._apply_grants),
        ):
            try:
                apply()
            except (OSError, ValueError) as error:
                problems.append(f"{self._directory / name} is invalid: {error}")
        for problem in problems:
            if problem not in self._reported:
                logger.warning("%s", problem)
        self._reported = problems

    def _apply_keys(self) -> None:
        self._verifier.trust(read_keys(self._directory))

    def _apply_policy(self) -> None:
        if self._pod.apply_policy(read_policy(self._directory), time.monotonic()):
            logger.info("admission policy changed: %s", self._pod.policy)

    def _apply_grants(self) -> None:
        file = self._directory / GRANTS_FILE
        keys = parse_grants(file.read_text()).keys if file.exists() else None
        self._usage_verifier.trust(keys or {})
