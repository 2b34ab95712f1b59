"""The engine document: what is taken, what is refused, and with which line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fleetkeeper_engine.devices.interface import Accelerator
from fleetkeeper_engine.spec import (
    DType,
    EngineDocument,
    InvalidDocumentError,
    parse_document,
    read_document,
)

CONTRACT = Path(__file__).resolve().parents[3] / "engine_image" / "schemas"
SCHEMA = json.loads((CONTRACT / "engine-document.schema.json").read_text())


def a_document(**changes: Any) -> dict[str, Any]:
    return {
        "contract": 1,
        "accelerator": "cpu",
        "model": {"source": "/models/llama", "servedName": "chat"},
        **changes,
    }


def test_a_small_document_gets_the_defaults_of_the_design() -> None:
    document = parse_document(json.dumps(a_document()))
    assert document.accelerator is Accelerator.CPU
    assert document.engine.dtype is DType.AUTO
    assert document.memory.cap_percent == 80
    assert document.health.stall_seconds == 60
    assert (document.drain.seconds, document.drain.notice_seconds) == (120, 5)
    assert (document.ports.serving, document.ports.control) == (8000, 9090)
    assert document.tiers.batch.share_percent == 30


def test_the_schema_takes_what_the_parser_writes() -> None:
    """The operator validates against the file, the pod with the model: both take the full document."""
    document = parse_document(
        json.dumps(
            a_document(
                model={
                    "source": "ORG/NAME",
                    "revision": "0e9e39f",
                    "servedName": "chat",
                    "adapters": [{"name": "sql", "path": "/adapters/sql"}],
                },
                engine={"options": {"enforce-eager": "true"}, "maxModelLength": 4096},
                memory={"capPercent": 70, "limitBytes": 4 * 1024**3},
            )
        )
    )
    jsonschema.validate(
        json.loads(document.model_dump_json(by_alias=True, exclude_none=True)), SCHEMA
    )
    again = parse_document(document.model_dump_json(by_alias=True))
    assert again == document


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"contract": 2}, "contract"),
        ({"accelerator": "tpu"}, "accelerator"),
        ({"surprise": 1}, "surprise"),
        ({"memory": {"capPercent": 96}}, "memory.capPercent"),
        ({"memory": {"capPercent": "80"}}, "memory.capPercent"),
        ({"model": {"source": "--config=x", "servedName": "a"}}, "model.source"),
        ({"model": {"source": "/m", "servedName": "-a"}}, "model.servedName"),
        ({"engine": {"options": {"Max": "1"}}}, "engine.options"),
        ({"engine": {"options": {"seed": "-1"}}}, "engine.options"),
        ({"engine": {"options": {"seed": "1 --config=x"}}}, "engine.options"),
        ({"batching": {"maxSequences": 4, "minSequences": 8}}, "batching"),
        ({"batching": {"maxSequences": 512, "maxTokens": 256}}, "batching"),
        ({"tiers": {"batch": {"queueLimit": 1, "sharePercent": 5, "floorPercent": 6}}}, "tiers"),
        ({"ports": {"host": "10.0.0.1"}}, "ports.host"),
    ],
)
def test_a_bad_field_is_named_in_one_line(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        parse_document(json.dumps(a_document(**changes)))
    assert where in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.promise("engine-options")
@pytest.mark.parametrize(
    "name",
    [
        "config",
        "conf",
        "middleware",
        "middle",
        "trust-remote-code",
        "max-num-seq",
        "api-k",
        "worker-cls",
        "num-gpu-blocks-override",
        "num-gpu-b",
        "no-enable-sleep-mode",
        "no-enable-lo",
        "no-disable-log",
        "device-memory-utilization",
        "distributed-executor-backend",
        "speculative-config",
        "spec-model",
        "master-addr",
        "pipeline-parallel-size",
        "data-parallel-rank",
        "ssl-ciphers",
        "no-data-parallel-hybrid-lb",
    ],
)
def test_an_option_that_loads_code_opens_files_or_is_ours_is_refused_also_abbreviated(
    name: str,
) -> None:
    """vLLM's parser takes any unambiguous beginning of an option's name."""
    with pytest.raises(InvalidDocumentError, match="not settable"):
        parse_document(json.dumps(a_document(engine={"options": {name: "x"}})))


def test_no_reserved_option_hides_an_ordinary_one() -> None:
    for name in (
        "enforce-eager",
        "seed",
        "max-logprobs",
        "block-size",
        "kv-cache-dtype",
        "swap-space",
    ):
        assert isinstance(
            parse_document(json.dumps(a_document(engine={"options": {name: "1"}}))), EngineDocument
        )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"'])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(InvalidDocumentError, match="FLEETKEEPER_ENGINE"):
        read_document({"FLEETKEEPER_ENGINE": text})


def test_the_contract_files_are_those_of_the_code() -> None:
    """`make check` compares the files; here the codes and names that the operator reads are looked at."""
    codes = json.loads((CONTRACT / "exit-codes.json").read_text())
    listed = {entry["class"]: entry["code"] for entry in codes["deaths"]}
    assert len(set(listed.values())) == len(listed)
    assert all(64 <= code <= 78 for code in listed.values())
    metrics = json.loads((CONTRACT / "metrics.json").read_text())
    names = [metric["name"] for metric in metrics["metrics"]]
    assert len(set(names)) == len(names)
    assert {"fleetkeeper_queue_wait_seconds", "fleetkeeper_batch_time_seconds"} <= set(names)


@pytest.mark.parametrize(
    ("tracing", "message"),
    [
        ({}, "tracing.endpoint: Field required"),
        ({"endpoint": "collector:4317"}, "tracing.endpoint"),
        ({"endpoint": "http://collector"}, "tracing.endpoint"),
        ({"endpoint": "http://user@collector:4317"}, "tracing.endpoint"),
        (
            {"endpoint": "http://collector:4317/v1/traces"},
            "with protocol grpc the endpoint has no path",
        ),
        ({"endpoint": "http://collector:70000"}, "65535"),
        ({"endpoint": "http://collector:4317", "sampleRatio": 1.1}, "tracing.sampleRatio"),
        ({"endpoint": "http://collector:4317", "headers": "a=b"}, "tracing.headers"),
    ],
)
def test_a_collector_that_cannot_be_reached_is_refused(
    tracing: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidDocumentError, match=message):
        parse_document(json.dumps(a_document(tracing=tracing)))
