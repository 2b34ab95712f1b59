"""An S3 API on loopback (moto), in a process of its own, with the files of a directory in a bucket."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.engine_environment import PYTHON, free_port

BUCKET = "models"
PREFIX = "tiny/v1"
REGION = "eu-central-1"
ACCESS_KEY = {"AWS_ACCESS_KEY_ID": "key-of-a-test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test"}

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
