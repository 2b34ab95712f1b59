"""A cluster as a user has it: a kubeconfig and common requests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.control_plane.programs import program_path

Live = dict[str, Any]
GROUP, VERSION, PLURAL = "fleetkeeper.io", "v1alpha1", "inferenceservices"
CHART = Path(__file__).resolve().parents[3] / "charts" / "fleetkeeper"
COMMAND_TIMEOUT_S = 300.0
"""A guard: on a busy machine, a command takes tens of seconds to start."""
REQUEST_TIMEOUT_S = 30.0


class CommandError(LocalError):
    """A command that failed; the text is its output."""


def on_path(name: str) -> Path:
    """Return a program of the user's PATH, or that of the local node, built if necessary."""
    found = shutil.which(name)
    return Path(found) if found else program_path(name)


def fleetkeeper(*words: str, timeout_s: float = COMMAND_TIMEOUT_S, **environment: str) -> str:
    """Run the command line as a user does; return its standard output.

    Raises:
        CommandError: it failed or timed out.
    """
    shown = f"fleetkeeper {' '.join(words)}"
    argv = [sys.executable, "-m", "fleetkeeper", *words]
    return _output(shown, argv, timeout_s, env={**os.environ, **environment}).strip()


def _output(
    shown: str,
    argv: list[str],
    timeout_s: float,
    given: str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    try:
        done = subprocess.run(
            argv,
            env=env,
            input=given or "",
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{shown}: timed out after {timeout_s:.0f} s") from error
    if done.returncode:
        raise CommandError(f"{shown}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Cluster:
    """A cluster, given by its kubeconfig."""

    def __init__(self, kubeconfig: Path, programs: Callable[[str], Path] = program_path) -> None:
        """Read the kubeconfig; nothing is requested yet. `programs` finds kubectl and helm."""
        self._programs = programs
        self.kubeconfig = kubeconfig
        api = config.new_client_from_config(str(kubeconfig))
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._cache = Path(tempfile.gettempdir()) / "fleetkeeper-kubectl-cache"

    # -- commands -----------------------------------------------------------------------------

    def kubectl(self, *args: str, given: str | None = None, timeout_s: float = 120.0) -> str:
        """Run kubectl and return its output.

        Raises:
            CommandError: it failed or timed out.
        """
        argv = ["kubectl", "--cache-dir", str(self._cache)]
        return self._run(argv, args, given, timeout_s)

    def argv(self, *args: str) -> list[str]:
        """Return kubectl's argument list, for callers that run it (exec, port-forward)."""
        return [str(self._programs("kubectl")), "--kubeconfig", str(self.kubeconfig), *args]

    def helm(
        self, *args: str, values: Mapping[str, Any] | None = None, timeout_s: float = 900.0
    ) -> str:
        """Run Helm, with values on standard input, and return its output.

        Raises:
            CommandError: it failed or timed out.
        """
        if values is None:
            return self._run(["helm"], args, None, timeout_s)
        return self._run(["helm"], (*args, "--values", "-"), json.dumps(values), timeout_s)

    def _run(
        self, argv: list[str], args: tuple[str, ...], given: str | None, timeout_s: float
    ) -> str:
        name, *options = argv
        program = [str(self._programs(name)), *options, "--kubeconfig", str(self.kubeconfig)]
        return _output(f"{name} {' '.join(args)}", [*program, *args], timeout_s, given)

    def apply(self, *manifests: Live, namespace: str | None = None) -> None:
        """Apply manifests server-side, with a field manager of its own."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        where = ("-n", namespace) if namespace else ()
        self.kubectl(
            *(*where, "apply", "--server-side", "--field-manager=fleetkeeper-demo", "-f", "-"),
            given=json.dumps(document),
        )

    # -- reads: they start no process -------------------------------------------------------------

    def inference_service(self, namespace: str, name: str) -> Live | None:
        """Return the InferenceService, or None if it does not exist."""
        try:
            found: Live = self._custom.get_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, _request_timeout=REQUEST_TIMEOUT_S
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    def pods(self, namespace: str, selector: str) -> list[Live]:
        """Return the pods with these labels, oldest first."""
        answer = self._core.list_namespaced_pod(
            namespace,
            label_selector=selector,
            _request_timeout=REQUEST_TIMEOUT_S,
            _preload_content=False,
        )
        items: list[Live] = json.loads(answer.data)["items"]
        return sorted(items, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def events(self, namespace: str, name: str) -> list[Live]:
        """Return the Events of an InferenceService, oldest first."""
        answer = self._core.list_namespaced_event(
            namespace,
            field_selector=f"involvedObject.name={name},involvedObject.kind=InferenceService",
            _request_timeout=REQUEST_TIMEOUT_S,
            _preload_content=False,
        )
        items: list[Live] = json.loads(answer.data)["items"]
        return sorted(items, key=lambda event: str(event["metadata"]["creationTimestamp"]))

    def cluster_ip(self, namespace: str, name: str) -> str:
        """Return the cluster IP of a Kubernetes Service.

        Raises:
            LocalError: it has none.
        """
        text = self.kubectl(
            *("-n", namespace, "get", "service", name, "-o", "jsonpath={.spec.clusterIP}")
        )
        if not text:
            raise LocalError(f"the Service {namespace}/{name} has no cluster IP")
        return text

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces."""
        return self.kubectl("get", "namespaces", "-o", "name").replace("namespace/", "").split()
