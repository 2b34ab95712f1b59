"""What a support bundle hides, and what it keeps."""

from __future__ import annotations

import time

import pytest

from fleetkeeper.commands.bundle.redaction import LAST_APPLIED, REDACTED, redact, redact_text

pytestmark = pytest.mark.slow

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer CANARY",
        "authorization: Basic CANARY",
        'headers={"Authorization": "Bearer CANARY", "Accept": "*/*"}',
        "(b'authorization', b'Bearer CANARY')",
        "sent bearer CANARY to the engine",
        "x-api-key: CANARY",
        "Cookie: a=1; session=CANARY",
        "https://user:CANARY@models.example/llama",
        "https://CANARY@models.example/llama",
        "s3://user:pa/ss?CANARY@models.example/llama",
        "GET https://models.example/a?version=1&X-Amz-Signature=CANARY failed",
        "GET /v1/models?token=CANARY HTTP/1.1",
        "password=CANARY",
        "HF_TOKEN=CANARY",
        'export OPENAI_API_KEY="CANARY with blanks"',
        '{"level": "info", "token": "CANARY"}',
        r"body={\"access_token\": \"one CANARY\"}",
        "{'api_key': ['first', 'CANARY'], 'port': 8000}",
        "api_key=SecretStr('CANARY')",
        "client_secret: CANARY",
        "vllm serve --api-key CANARY --port 8000",
        "['serve', '--api-key', 'CANARY']",
        "--hf-token=CANARY",
        "key hf_CANARYabcdef",
        "key sk-CANARYabcdef",
        "a value CANARY" + "aB3" * 12,
        "a value " + HEX[:20] + "CANARY".lower() + HEX,
        "eyJhbGciOi.CANARY.sig",
        "-----BEGIN PRIVATE KEY-----\nCANARY\n-----END PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nCANARY and the log ends here",
        "DB_PASS=CANARY",
        "PGPASS: CANARY",
        "--db-pass CANARY",
        "--db-pass=CANARY",
        "db_pw=CANARY",
        '{"token": {"value": "CANARY"}}',
        r"body={\"token\": {\"value\": \"one } CANARY\"}}",
        '{"password": {\n  "value": "CANARY"\n}}',
        "credentials={'user': 'a', 'pw': 'CANARY'}",
        "credentials={'user': 'a', 'note': 'a } in it', 'x': ['CANARY']}",
        "credentials={'user': " + "'a', " * 2000 + "'x': 'CANARY'}",
        "cookies={'session': 'CANARY'}",
        '"secrets": ["CANARY"]',
        "('password', 'CANARY')",
        "(b'password', b'CANARY')",
        "api_key=SecretStr('two CANARY')",
        "['--api-key', ['one', 'CANARY']]",
        "AUTH PLAIN CANARY",
        "AUTH user CANARY",
        "Incorrect API key provided: CANARY.",
        "the password used was: CANARY",
        "tokens: {'a': 1} token: {'b': 'a line that ends too early CANARY",
    ],
)
def test_a_credential_in_a_text_is_hidden(text: str) -> None:
    assert "canary" in text.lower()
    assert "canary" not in redact_text(text).lower()
    assert redact_text(redact_text(text)) == redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "pod chat-7d9c5b8f6d-x2x4z was OOM-killed (limit 32Gi)",
        f"registry.example.com/engine@sha256:{HEX}",
        "uid 6f1c2b1e-7a51-4d8e-9a35-0d5d2b0f8b11",
        "max_num_batched_tokens=2048 tokens: 12",
        "inter-token latency 33.7 ms",
        "http://chat.team-a.svc:80/v1/models",
        "2026-01-02T03:04:05.123456789Z INFO /usr/local/lib/python3.11/site-packages/vllm/engine.py",
        'Secret "hub" not found',
        "bypass: true, compass=north, 3 passes",
        "{'max_num_batched_tokens': 2048, 'prompt_tokens': [12, 7]}",
        "token: [redacted] and what comes behind it",
    ],
)
def test_what_a_report_needs_stays(text: str) -> None:
    assert redact_text(text) == text


def test_the_names_of_a_models_secrets_stay() -> None:
    model = {"tokenSecret": {"name": "hub", "key": "token"}, "credentialsSecret": "s3-reader"}
    assert redact({"model": model}) == {"model": model}


OBJECTS = {
    "a map": {"password": {"value": "CANARY"}},
    "a map in a map": {"credentials": {"user": "a", "more": {"x": ["CANARY"]}}},
    "a list": {"secrets": ["CANARY"]},
    "a list of maps": {"secrets": [{"name": "a", "value": "CANARY"}]},
    "a map beside a reference": {"tokenSecret": {"name": "hub", "value": "CANARY"}},
    "a text in place of a reference": {"imagePullSecrets": ["CANARY"]},
    "a number": {"pin_token": 7001},
    "an annotation": {"annotations": {"db/pass": "CANARY"}},
    "a short name": {"data": {"db_pw": "CANARY"}},
    "a pair": {"headers": [["x-password", "CANARY"], ["accept", "x"]]},
    "arguments": {"args": ["serve", "--db-pass", "CANARY"]},
    "a document in a text": {"data": {"a": '{"token": {"value": "CANARY"}}'}},
    "cookies": {"cookies": {"session": "CANARY"}},
}


@pytest.mark.parametrize("what", OBJECTS)
def test_a_sensitive_name_hides_all_that_is_below_it(what: str) -> None:
    found = redact(OBJECTS[what])
    assert "CANARY" not in str(found)
    assert "7001" not in str(found)
    assert redact(found) == found


def test_what_names_a_secret_stays() -> None:
    pod = {
        "imagePullSecrets": [{"name": "registry"}],
        "automountServiceAccountToken": False,
        "volumes": [
            {"name": "a", "secret": {"secretName": "ca", "items": [{"key": "k", "path": "p"}]}},
            {"projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": "x"}}]}},
        ],
    }
    assert redact(pod) == pod
    assert redact({"secrets": [{"name": "chat-token"}]}) == {"secrets": [{"name": "chat-token"}]}


def test_what_follows_a_value_in_brackets_stays() -> None:
    text = "credentials={'user': 'it\\'s', 'x': [1, {'y': ']'}]}, port=8000"
    assert redact_text(text) == f"credentials={REDACTED}, port=8000"


def test_variables_are_hidden_whatever_their_names() -> None:
    pod = {
        "env": [
            {"name": "HARMLESS", "value": "canary"},
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ]
    }
    assert redact(pod) == {
        "env": [
            {"name": "HARMLESS", "value": REDACTED},
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ]
    }
    service = {
        "env": {"MINE": "canary", "HUB": {"secretKeyRef": {"name": "hub", "key": "api-key"}}}
    }
    assert redact(service)["env"] == {
        "MINE": REDACTED,
        "HUB": {"secretKeyRef": {"name": "hub", "key": "api-key"}},
    }


def test_arguments_after_flags_of_keys_are_hidden() -> None:
    args = ["serve", "--api-key", "one", "two", "--port", "8000", "--hf-token=three", "-x"]
    assert redact({"args": args})["args"] == [
        *("serve", "--api-key", REDACTED, REDACTED, "--port", "8000"),
        *(f"--hf-token={REDACTED}", "-x"),
    ]


def test_documents_in_strings_are_redacted_by_their_structure() -> None:
    data = {
        "settings.yaml": "profiles:\n- env:\n  - {name: A, value: canary}\n  args: [--api-key, canary]\n",
        "config": '{"env": [{"name": "A", "value": "canary"}], "replicas": 2}',
        "broken.yaml": "a: [\ntoken: canary",
        "token": "canary",
    }
    found = redact({"data": data})["data"]
    assert "canary" not in str(found)
    assert '"replicas": 2' in found["config"]
    assert "--api-key" in found["settings.yaml"]


def test_the_last_applied_configuration_and_headers_are_hidden() -> None:
    found = redact(
        {
            "annotations": {LAST_APPLIED: "canary", "example.com/access-key": "canary", "a/b": "c"},
            "httpHeaders": [{"name": "X-Mine", "value": "canary"}],
            "binaryData": {"a": "canary"},
        }
    )
    assert "canary" not in str(found)
    assert found["annotations"]["a/b"] == "c"


@pytest.mark.parametrize(
    "piece",
    [
        *("eyJ-", "a://", "a://b:", "token=[", "token=[\n", "token={'", "x", "--", '\\"token\\"'),
        *("-----BEGIN A-----", "token is ", "'token',", "AUTH ", "token=" + "a" * 63),
    ],
)
def test_a_hostile_log_takes_linear_time(piece: str) -> None:
    """A line of 256 KiB takes a few seconds; with quadratic time it would take hours."""
    before = time.process_time()
    redact_text(piece * (256 * 1024 // len(piece)))
    assert time.process_time() - before < 60
