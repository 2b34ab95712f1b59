"""Access to a control plane in a data directory: its addresses, files and API."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.control_plane import probes
from fleetkeeper_local.control_plane.kubeconfig import write_kubeconfig
from fleetkeeper_local.control_plane.pki import Authority, Identity
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.processes import Processes
from fleetkeeper_local.control_plane.programs import program_path

STATE_FILE = "control-plane.json"


class KubectlError(LocalError):
    """A kubectl command that failed; the text is its output."""


@dataclass(frozen=True)
class Endpoint:
    """The address and ports of one control plane, stored so that each `up` uses the same ones."""

    host: str
    api: int
    etcd: int
    etcd_peer: int
    controller_manager: int
    scheduler: int
    kwok: int

    @classmethod
    def free(cls, host: str = "127.0.0.1", api: int | None = None) -> Endpoint:
        """Return an endpoint with free ports; the API server's port may be given."""
        ports = free_ports(6)
        return cls(host, api if api is not None else ports[0], *ports[1:])


class Access:
    """A control plane as seen by its administrator, running or not."""

    def __init__(self, directory: Path, endpoint: Endpoint | None, processes: Processes) -> None:
        """Describe the access.

        Args:
            directory: the data directory.
            endpoint: address and ports; None reads those that a start stored.
            processes: the processes of the directory.
        """
        self.directory = directory
        self.processes = processes
        self._endpoint = endpoint

    @property
    def endpoint(self) -> Endpoint:
        """The address and ports.

        Raises:
            LocalError: the control plane was never started.
        """
        if self._endpoint is None:
            self._endpoint = self.read_endpoint()
        if self._endpoint is None:
            raise LocalError(f"no control plane was started in {self.directory}")
        return self._endpoint

    @property
    def pki(self) -> Path:
        """The directory of the certificates."""
        return self.directory / "pki"

    @property
    def ca_file(self) -> Path:
        """The certificate of the authority that signed the API server's certificate."""
        return self.pki / "ca.crt"

    @property
    def apiserver_url(self) -> str:
        """`https://HOST:PORT` of the API server."""
        return f"https://{self.endpoint.host}:{self.endpoint.api}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig (user `admin`, group `system:masters`)."""
        return self.directory / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON event per line for every request, at level Metadata, without RequestReceived."""
        return self.directory / "audit.log"

    def is_described(self) -> bool:
        """Return whether an earlier start stored the address and ports."""
        return self._endpoint is not None or self.read_endpoint() is not None

    def use_endpoint(self, endpoint: Endpoint) -> None:
        """Set the address and ports before the first start."""
        self._endpoint = endpoint

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - subprocess's own name for it
        kubeconfig: Path | None = None,
        timeout_s: float = 400.0,
    ) -> str:
        """Run kubectl as the administrator (or with another kubeconfig) and return its output.

        Raises:
            KubectlError: kubectl failed or timed out.
        """
        argv = [str(program_path("kubectl")), "--kubeconfig", str(kubeconfig or self.kubeconfig)]
        argv += ["--cache-dir", str(self.directory / "kubectl-cache"), *args]
        try:
            done = subprocess.run(
                argv, input=input, capture_output=True, text=True, check=False, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(
                f"kubectl {' '.join(args)}: timed out after {timeout_s} s"
            ) from error
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip() or done.stdout}")
        return done.stdout

    def get(self, path: str) -> Any:  # noqa: ANN401 - any JSON
        """Return the decoded response to an administrator's GET of an API path, None if not 200."""
        return probes.fetch_json(self.apiserver_url + path, self.context())

    def user_kubeconfig(self, name: str, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig with a client certificate for a user; only RBAC grants permissions."""
        safe = name.replace("/", "_").replace(":", "_")
        identity = Authority(self.pki, "ca").issue(f"user-{safe}", name, groups=groups)
        return write_kubeconfig(
            self.directory / "users" / f"{safe}.kubeconfig",
            self.apiserver_url,
            self.ca_file,
            name,
            identity,
        )

    def service_account_kubeconfig(
        self, namespace: str, name: str, *, duration: str = "8h"
    ) -> Path:
        """Write a kubeconfig with a bearer token of an existing ServiceAccount."""
        token = self.kubectl("-n", namespace, "create", "token", name, "--duration", duration)
        return write_kubeconfig(
            self.directory / "users" / f"{namespace}-{name}.kubeconfig",
            self.apiserver_url,
            self.ca_file,
            f"system:serviceaccount:{namespace}:{name}",
            token.strip(),
        )

    def context(self) -> ssl.SSLContext:
        """Return the TLS settings of a request as the administrator."""
        identity = Identity(self.pki / "admin.crt", self.pki / "admin.key")
        return probes.client_context(self.ca_file, identity)

    def read_endpoint(self) -> Endpoint | None:
        """Return the stored address and ports, or None."""
        try:
            return Endpoint(**json.loads((self.directory / STATE_FILE).read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return None  # never started, or interrupted while it wrote
