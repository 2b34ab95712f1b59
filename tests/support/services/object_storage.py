"""An S3 API on loopback (moto), in a process of its own, with the files of a directory in a bucket."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetkeeper.api.parse import parse_service
from fleetkeeper.api.profiles.object_storage import ObjectStorage
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from tests.support.engine.engine_environment import PYTHON, free_port
from tests.support.reconcile.random_specs import service_manifest

BUCKET = "models"
PREFIX = "tiny/v1"
REGION = "eu-central-1"
ACCESS_KEY = {"AWS_ACCESS_KEY_ID": "key-of-a-test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test"}
SECRET = "s3-reader"

_SERVER = """
import sys, threading
from pathlib import Path
import boto3
from moto.server import ThreadedMotoServer

directory, port, bucket, prefix, region = sys.argv[1:]
ThreadedMotoServer(ip_address="127.0.0.1", port=int(port)).start()
client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name=region)
client.create_bucket(
    Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": region}
)
for file in Path(directory).iterdir():
    client.upload_file(str(file), bucket, f"{prefix}/{file.name}")
print("ready", flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True)
class Storage:
    """A running S3 API."""

    endpoint: str
    log_file: Path

    @property
    def log(self) -> str:
        """A line for each request: method, path, and status."""
        return self.log_file.read_text()


@contextmanager
def object_storage(directory: Path, log_file: Path) -> Iterator[Storage]:
    """An S3 API whose bucket `models` has the files of `directory` at the prefix `tiny/v1`."""
    port = free_port()
    words = [str(directory), str(port), BUCKET, PREFIX, REGION]
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            [PYTHON, "-c", _SERVER, *words],
            env=dict(ACCESS_KEY),
            stdout=subprocess.PIPE,
            stderr=log,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            # The server writes lines of its own before.
            assert b"ready\n" in server.stdout, log_file.read_text()
            yield Storage(f"http://127.0.0.1:{port}", log_file)
        finally:
            server.terminate()


def pod_environment(endpoint: str, source: str) -> dict[str, str]:
    """Return the environment of a service's engine container, as the kubelet would resolve it."""
    spec = {
        "model": {"source": source, "credentialsSecret": SECRET},
        "engine": {
            "profile": "cpu",
            "dtype": "float32",
            "maxModelLength": 2048,
            "options": {"enforce-eager": "true"},
        },
        "resources": {"memory": "4Gi", "sharedMemory": "1Gi"},
        "batching": {"maxSequences": 64, "minSequences": 1, "maxTokens": 2048},
    }
    service = parse_service(service_manifest(spec, name="tiny"))
    context = default_context()
    profile = context.catalog.resolve("cpu").model_copy(
        update={"object_storage": ObjectStorage(endpoint=endpoint, region=REGION, path_style=True)}
    )
    template = desired_engine_template(service, profile, context)
    (container,) = template["spec"]["containers"]
    return {
        item["name"]: _resolved(item)
        for item in container["env"]
        if item["name"] not in {"POD_UID", "USER"}
    }


def _resolved(item: Mapping[str, Any]) -> str:
    if "valueFrom" not in item:
        return str(item.get("value", ""))
    reference = item["valueFrom"]["secretKeyRef"]
    assert reference["name"] == SECRET
    return ACCESS_KEY[reference["key"]]
