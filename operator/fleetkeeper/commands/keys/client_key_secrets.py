"""The Secrets of client keys, read and written with the rights of the user."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from fleetkeeper.exit_codes import ExitCode, stop
from fleetkeeper.fleet.source import load_api
from fleetkeeper_contract.client_key_entries import (
    BadEntry,
    ClientKey,
    decoded_entries,
    entries_of,
    parse_entries,
)
from fleetkeeper_contract.client_keys import KEY_LABEL, KEY_SECRET_TYPE

FIELD_MANAGER: Final = "fleetkeeper-keys"
"""The gateway's audit log names it as the actor."""
TIMEOUT_S: Final = 10.0

Secret = dict[str, Any]


def manifest_of(namespace: str, name: str, key: ClientKey) -> Secret:
    """Return the Secret of a key.

    It has `data`, not `stringData`: an entry that is removed from `stringData` stays in the cluster.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": {KEY_LABEL: "true"}},
        "type": KEY_SECRET_TYPE,
        "data": encoded(key),
    }


def encoded(key: ClientKey) -> dict[str, str]:
    """Return the `data` of a key's Secret."""
    return {
        entry: base64.b64encode(value.encode()).decode() for entry, value in entries_of(key).items()
    }


def key_of(secret: Mapping[str, Any]) -> ClientKey:
    """Return the key of a Secret.

    Raises:
        BadEntry: it describes no key.
    """
    name = secret["metadata"]["name"]
    return parse_entries(decoded_entries(secret.get("data")), default_name=name)


class KeySecrets:
    """The Secrets of client keys in one namespace. A failure stops the command with its reason."""

    def __init__(self, namespace: str) -> None:
        from kubernetes import client  # noqa: PLC0415 - takes 0.5 s; only these commands need it
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        self.namespace = namespace
        api = load_api()
        self._host = api.configuration.host
        self._core = client.CoreV1Api(api)
        self._refusal = client.ApiException
        self._problems = (client.ApiException, HTTPError, OSError)

    def create(self, name: str, key: ClientKey) -> None:
        """Create the Secret of a new key."""
        self._call(
            f"create the Secret {self.namespace}/{name}",
            self._core.create_namespaced_secret,
            self.namespace,
            manifest_of(self.namespace, name, key),
            field_manager=FIELD_MANAGER,
        )

    def list(self) -> list[Secret]:
        """Return all Secrets of keys, by name."""
        found = self._call(
            f"list the Secrets of namespace {self.namespace}",
            self._core.list_namespaced_secret,
            self.namespace,
            label_selector=f"{KEY_LABEL}=true",
        )
        return sorted(found["items"], key=lambda secret: str(secret["metadata"]["name"]))

    def read(self, name: str) -> Secret:
        """Return the Secret of a key. Any other Secret stops the command."""
        found: Secret = self._call(
            f"read the Secret {self.namespace}/{name}",
            self._core.read_namespaced_secret,
            name,
            self.namespace,
        )
        if (found["metadata"].get("labels") or {}).get(KEY_LABEL) != "true":
            stop(
                ExitCode.FAILED,
                f"the Secret {self.namespace}/{name} has no label {KEY_LABEL}=true, so it is no "
                "client key; nothing changed",
            )
        return found

    def read_key(self, name: str) -> tuple[Secret, ClientKey]:
        """Return the Secret of a key, and the key. A malformed one stops the command."""
        secret = self.read(name)
        try:
            return secret, key_of(secret)
        except BadEntry as problem:
            stop(
                ExitCode.BAD_INPUT,
                f"the Secret {self.namespace}/{name} is malformed: {problem}; correct it, or revoke the key",
            )

    def replace(self, secret: Secret, key: ClientKey) -> None:
        """Write a key to its Secret, unless the Secret has changed since it was read."""
        name = secret["metadata"]["name"]
        self._call(
            f"write the Secret {self.namespace}/{name}",
            self._core.replace_namespaced_secret,
            name,
            self.namespace,
            {**secret, "data": encoded(key)},
            field_manager=FIELD_MANAGER,
        )

    def delete(self, secret: Secret) -> None:
        """Delete the Secret of a key, and no other one of the same name."""
        name = secret["metadata"]["name"]
        self._call(
            f"delete the Secret {self.namespace}/{name}",
            self._core.delete_namespaced_secret,
            name,
            self.namespace,
            body={"preconditions": {"uid": secret["metadata"]["uid"]}},
        )

    def _call(
        self, what: str, function: Callable[..., Any], *args: object, **options: object
    ) -> Any:  # noqa: ANN401 - any JSON
        try:
            answer = function(*args, **options, _preload_content=False, _request_timeout=TIMEOUT_S)
            return json.loads(answer.data)
        except self._problems as problem:
            self._stop(what, problem)

    def _stop(self, what: str, problem: Exception) -> NoReturn:
        status = getattr(problem, "status", None)
        advice = {
            403: "ask for rights on the Secrets of this namespace",
            404: "see the keys with: fleetkeeper keys list; set --keys-namespace to the gateway's keys namespace",
            409: "it exists, or changed at the same time; choose another name, or run the command again",
        }.get(status, "check the kubeconfig (KUBECONFIG)")  # type: ignore[arg-type]
        stop(
            ExitCode.FAILED, f"cannot {what} at {self._host}: {self._reason_of(problem)}; {advice}"
        )

    def _reason_of(self, problem: Exception) -> str:
        if isinstance(problem, self._refusal):
            try:
                return str(json.loads(problem.body)["message"])
            except (TypeError, ValueError, KeyError):
                return f"{problem.status} {problem.reason}"
        lines = str(problem).splitlines()
        return lines[0] if lines else type(problem).__name__
