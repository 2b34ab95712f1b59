"""The data source of `top` and `explain`: the API server and the metrics of the leading operator.

Metrics are read through the pod proxy of the API server, so a kubeconfig is sufficient. For an
operator that does not run as a pod, the user gives a URL.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.request import urlopen

from fleetkeeper.api import names
from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.fleet.pages import read_pages
from fleetkeeper.fleet.view import Gauges, ServiceKey, parse_gauges
from fleetkeeper_kube.errors import ApiError

OPERATOR_SELECTOR = "app.kubernetes.io/name=fleetkeeper"
METRICS_PORT = 8080
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A snapshot of services and gauges. `remark` says why gauges are missing."""

    services: list[dict[str, Any]]
    gauges: dict[ServiceKey, Gauges]
    remark: str = ""


class FleetError(Exception):
    """The services could not be read. The message says what was asked, of whom, and what to do."""


class FleetSource:
    """A reader that uses the credentials of the user.

    `metrics_url` is the URL of an operator's metrics. Without it, the Lease in `operator_namespace`
    identifies the leader. `kubeconfig` replaces the default kubeconfig.
    """

    def __init__(
        self, operator_namespace: str, metrics_url: str = "", *, kubeconfig: str | None = None
    ) -> None:
        from kubernetes import client  # noqa: PLC0415 - takes 0.5 s; only these commands need it
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        api = load_api(kubeconfig)
        self._host = api.configuration.host
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._leases = client.CoordinationV1Api(api)
        self._refusal = client.ApiException
        self._problems = (client.ApiException, ApiError, HTTPError, OSError)
        self._operator_namespace = operator_namespace
        self._metrics_url = metrics_url

    def read_fleet(self, namespace: str | None) -> Fleet:
        """Return all services of a namespace (None: of the cluster) with their gauges.

        Raises:
            FleetError: The API server did not answer, or refused.
        """
        services = self._services(namespace)
        try:
            text = self._metrics()
        except (*self._problems, LookupError) as problem:
            return Fleet(services, {}, f"no metrics: {in_a_line(problem)}")
        return Fleet(services, dict(parse_gauges(text)))

    def _services(self, namespace: str | None) -> list[dict[str, Any]]:
        group = (names.GROUP, names.VERSION)
        ask = (
            partial(self._objects.list_cluster_custom_object, *group, names.PLURAL)
            if namespace is None
            else partial(
                self._objects.list_namespaced_custom_object, *group, namespace, names.PLURAL
            )
        )

        def fetch(page: dict[str, str | int]) -> bytes:
            answer = ask(
                limit=page["limit"],
                _continue=page.get("continue"),
                _preload_content=False,
                _request_timeout=TIMEOUT_S,
            )
            if answer.status != HTTPStatus.OK:
                raise self._refusal(status=answer.status, reason=answer.reason)
            return bytes(answer.data)

        try:
            return [item for page in read_pages(fetch) for item in page["items"]]
        except self._problems as problem:
            raise FleetError(
                f"cannot list InferenceServices of {self._host}: {in_a_line(problem)}; "
                "check the kubeconfig (KUBECONFIG) and your rights"
            ) from problem

    def _metrics(self) -> str:
        """Return the metrics of the leader in Prometheus' text format.

        Raises:
            LookupError: No operator pod is the leader.
        """
        if self._metrics_url:
            with urlopen(self._metrics_url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the user gives the URL
                return str(answer.read().decode())
        leases = self._leases.list_namespaced_lease(
            self._operator_namespace, _request_timeout=TIMEOUT_S
        )
        holders = {lease.spec.holder_identity for lease in leases.items}
        pods = self._core.list_namespaced_pod(
            self._operator_namespace,
            label_selector=OPERATOR_SELECTOR,
            _request_timeout=TIMEOUT_S,
        )
        leader = next((pod for pod in pods.items if pod.metadata.uid in holders), None)
        if leader is None:
            raise LookupError(
                f"no operator pod in namespace {self._operator_namespace} holds the Lease; "
                "set --operator-namespace, or --metrics http://HOST:PORT/metrics"
            )
        answer = self._core.connect_get_namespaced_pod_proxy_with_path(
            f"{leader.metadata.name}:{METRICS_PORT}",
            self._operator_namespace,
            "metrics",
            _preload_content=False,
            _request_timeout=TIMEOUT_S,
        )
        return str(answer.data.decode())


def load_api(kubeconfig: str | None = None) -> Any:  # noqa: ANN401 - kubernetes has no types
    """Return a client with the user's kubeconfig, or stop the command."""
    from kubernetes import client, config  # noqa: PLC0415 - takes 0.5 s; only these commands need it
    from kubernetes.config import ConfigException  # noqa: PLC0415

    try:
        config.load_config(**({"config_file": kubeconfig} if kubeconfig else {}))
    except ConfigException as problem:
        stop(
            ExitCode.FAILED,
            f"cannot load a kubeconfig: {problem}; set KUBECONFIG to a valid kubeconfig",
        )
    configuration = client.Configuration.get_default_copy()
    # The user waits: a second try of a connection that was refused only takes time.
    configuration.retries = False
    return client.ApiClient(configuration)


def in_a_line(problem: Exception) -> str:
    """Return the status and reason of a refusal, else the first line of the problem."""
    reason = getattr(problem, "reason", None)
    status = getattr(problem, "status", None)
    if reason and status:
        return f"{status} {reason}"
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
