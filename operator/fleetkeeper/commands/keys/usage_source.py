"""The usage process, through the API server's proxy of its Service, or at a URL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import urlencode
from urllib.request import urlopen

from fleetkeeper.fleet.source import load_api
from fleetkeeper_contract.grants import USAGE_POD_LABELS

SELECTOR: Final = ",".join(f"{name}={value}" for name, value in USAGE_POD_LABELS.items())
PORT_NAME: Final = "usage"
TIMEOUT_S: Final = 120.0
"""A report reads the files of all its hours."""
PATH: Final = "v1/usage"


class UsageError(Exception):
    """Usage that could not be read. The message says from where, and what to do."""


def read_from_url(url: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the usage that a process at a URL answers.

    Raises:
        UsageError: it did not answer.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url is {url!r}; it must begin with http:// or https://")
    address = f"{url.rstrip('/')}/{PATH}?{urlencode(query)}"
    try:
        with urlopen(address, timeout=TIMEOUT_S) as answer:  # noqa: S310 - checked above
            content = answer.read()
    except (OSError, HTTPException, ValueError) as problem:
        raise UsageError(f"cannot read usage from {address}: {problem}") from problem
    return _document(content, address)


def read_from_cluster(namespace: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the usage that the process in the operator's namespace answers.

    Raises:
        UsageError: there is none, or it did not answer.
    """
    from kubernetes import client  # noqa: PLC0415 - takes 0.5 s; only these commands need it
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    api = load_api()
    core = client.CoreV1Api(api)
    problems = (client.ApiException, HTTPError, OSError)
    try:
        services = core.list_namespaced_service(
            namespace, label_selector=SELECTOR, _request_timeout=TIMEOUT_S
        ).items
    except problems as problem:
        raise UsageError(
            f"cannot list the Services of namespace {namespace}: {_in_a_line(problem)}; "
            "check the kubeconfig (KUBECONFIG) and your rights"
        ) from problem
    if not services:
        raise UsageError(
            f"namespace {namespace} has no Service with {SELECTOR}; set --operator-namespace, "
            "or install the gateway (chart value gateway.enabled)"
        )
    name = services[0].metadata.name
    try:
        # The generated method for this path takes no parameters of the query.
        request = api.param_serialize(
            "GET",
            f"/api/v1/namespaces/{namespace}/services/{name}:{PORT_NAME}/proxy/{PATH}",
            query_params=list(query.items()),
            auth_settings=["BearerToken"],
        )
        answer = api.call_api(*request, _request_timeout=TIMEOUT_S)
        content = answer.read()
        if answer.status != HTTPStatus.OK:
            raise client.ApiException(http_resp=answer)
    except problems as problem:
        raise UsageError(
            f"Service {namespace}/{name} did not answer: {_in_a_line(problem)}; if a NetworkPolicy "
            f"keeps the API server out, run: kubectl port-forward -n {namespace} service/{name} "
            "8082, and set --url http://127.0.0.1:8082"
        ) from problem
    return _document(content, name)


def _document(content: bytes, source: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as problem:
        raise UsageError(f"the answer of {source} is not JSON: {problem}") from problem
    if not isinstance(found, dict) or not {"rows", "unattributed", "lost"} <= found.keys():
        raise UsageError(f"the answer of {source} is no usage")
    return found


def _in_a_line(problem: Exception) -> str:
    reason, status = getattr(problem, "reason", None), getattr(problem, "status", None)
    if reason and status:
        return f"{status} {reason}"
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
