"""The gateway as a client and its administrator meet it: a key, its limit, what was counted."""

from __future__ import annotations

import csv
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetkeeper_local.common.errors import LocalError
from fleetkeeper_local.demo.cluster import Cluster, fleetkeeper
from fleetkeeper_local.demo.fleet import Fleet

KEYS_NAMESPACE = "fleetkeeper-keys"
KEY = "demo"
REQUESTS_PER_MINUTE = 5
ANSWER_TOKENS = 8
REQUEST_TIMEOUT_S = 120.0
WAIT_S = 300.0
"""A guard: a new key is in force after 2 s, usage is read after 5 s, and a change of spec.access reaches
the engines when the kubelet brings its ConfigMap into the pods."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the gateway."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: dict[str, Any]

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the prompt and answer tokens that the answer states."""
        usage = self.body["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]


class FrontDoor:
    """A gateway at `url`, and the commands of its administrator."""

    def __init__(self, cluster: Cluster, url: str, namespace: str) -> None:
        """Store the names. `namespace`: that of the release."""
        self._cluster = cluster
        self._url = url
        self._namespace = namespace

    def command(self, *arguments: str) -> str:
        """Run the command line and return its standard output.

        Raises:
            LocalError: it failed; the text is its error.
        """
        return fleetkeeper(*arguments, KUBECONFIG=str(self._cluster.kubeconfig))

    def create_key(self, name: str, namespace: str, *options: str) -> str:
        """Create a key, in place of an earlier one with this name, and return it once it is in force."""
        self._cluster.kubectl(
            *("-n", KEYS_NAMESPACE, "delete", "secret", name, "--ignore-not-found")
        )
        key = self.command("keys", "create", name, "--namespace", namespace, *options)
        _await(lambda: self.models(key).status == 200, f"key {name} in force")
        return key

    def models(self, key: str, *, url: str = "") -> Answer:
        """List the models that a key may see, at another address if `url` is given."""
        return self._ask("/v1/models", key, None, url=url)

    def complete(self, key: str, model: str, *, url: str = "", **headers: str) -> Answer:
        """Complete a short prompt, at another address if `url` is given."""
        body = {
            "model": model,
            "prompt": "The queue",
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }
        return self._ask("/v1/completions", key, body, url=url, headers=headers)

    def counted(self, key: str) -> tuple[int, int, int]:
        """Return the requests, prompt tokens and answer tokens that the engines counted for a key."""
        text = self.command(
            *("usage", "--since", "1h", "--by", "key", "--csv"),
            *("--operator-namespace", self._namespace),
        )
        for row in csv.DictReader(text.splitlines()):
            if (row["kind"], row["key"]) == ("attributed", key):
                return int(row["requests"]), int(row["prompt"]), int(row["answer"])
        return 0, 0, 0

    def _ask(
        self,
        path: str,
        key: str,
        body: dict[str, Any] | None,
        *,
        url: str = "",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        request = urllib.request.Request(  # noqa: S310 - http: the address of the gateway
            f"{url or self._url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {key}",
                "Content-Type": "application/json",
                **(headers or {}),
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:  # noqa: S310 - as above
                return _answer(answer.status, answer.headers.items(), answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error.headers.items(), error.read())


def _answer(status: int, headers: Any, content: bytes) -> Answer:  # noqa: ANN401 - pairs of two libraries
    try:
        body = json.loads(content)
    except ValueError:
        body = {"text": content.decode(errors="replace")}
    return Answer(status, {name.lower(): value for name, value in headers}, body)


def _await(question: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not question():
        if time.monotonic() > end_s:
            raise LocalError(f"gateway: not within {WAIT_S:.0f} s: {what}")
        time.sleep(POLL_S)


def set_access(fleet: Fleet, access: str, base_url: str) -> None:
    """Set spec.access, and return when all engines follow it.

    Args:
        fleet: the service.
        access: Gateway or Open.
        base_url: of its own API, around the gateway.
    """
    status = {"Gateway": 401, "Open": 200}[access]
    around = FrontDoor(fleet.cluster, base_url.removesuffix("/v1"), "")
    fleet.change({"access": access})
    _await(
        lambda: around.complete("made-up", fleet.name).status == status,
        f"status {status} of requests around the gateway",
    )


def chapter(door: FrontDoor, namespace: str, model: str, say: Callable[[str], None]) -> list[str]:
    """Create a key, reach its limit, compare what it used with what was counted; return the report.

    No other client uses this model with the key, so the counts are those of the answers.

    Raises:
        LocalError: the gateway did something else than it promises.
    """
    say(f"gateway: a key for namespace {namespace} with {REQUESTS_PER_MINUTE} requests a minute")
    limit = f"--requests-per-minute={REQUESTS_PER_MINUTE}"
    before = door.counted(KEY)
    key = door.create_key(KEY, namespace, limit)
    seen = [item["id"] for item in door.models(key).body["data"]]
    answered: list[Answer] = []
    # A minute may end in between, and each replica has its own limit if there is no Redis.
    while (answer := door.complete(key, model)).status == 200:
        answered.append(answer)
        if len(answered) > 4 * REQUESTS_PER_MINUTE:
            raise LocalError(f"gateway: {len(answered)} requests were answered: no limit")
    if answer.status != 429:
        raise LocalError(f"gateway: status {answer.status}: {answer.body}")
    tokens = [item.tokens for item in answered]
    used = (len(answered), sum(prompt for prompt, _ in tokens), sum(count for _, count in tokens))
    expected = tuple(more + old for more, old in zip(used, before, strict=True))
    _await(lambda: door.counted(KEY) == expected, f"usage {expected} of key {KEY}")
    lines = [
        f"fleetkeeper keys create {KEY} --namespace {namespace} {limit}",
        f"GET /v1/models with this key: {', '.join(seen)}",
        f"{used[0]} requests answered, then 429 with Retry-After: {answer.headers['retry-after']}",
        f"The answers stated {used[1]} prompt tokens and {used[2]} answer tokens.",
        "fleetkeeper usage --since 1h",
        *(f"  {line}" for line in door.command("usage", "--since", "1h").splitlines()),
    ]
    for line in lines:
        say(f"gateway: {line}")
    return lines
