"""Download of a model's configuration from object storage: a separate process, before the memory is planned.

Weights are not downloaded, because vLLM streams them. Only the header of each file is, into a file of
the same size without data (it takes no disk space), so that the memory plan reads the sizes of tensors
as it does for a directory. Prints the directory as its last line.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetkeeper_engine.supervisor.launch.fetch import MARK
from fleetkeeper_engine.supervisor.launch.fetch import PATTERNS as PATTERNS_OF_HUB
from fleetkeeper_engine.supervisor.launch.object_storage import SCHEME

WEIGHTS = ".safetensors"
PATTERNS = [pattern for pattern in PATTERNS_OF_HUB if not pattern.endswith(WEIGHTS)]
MAX_HEADER_BYTES = 100 * 1024**2
LENGTH_BYTES = 8
CONFIG = "config.json"
ADDRESSING_VARIABLE = "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"


def main() -> None:
    """Download what the memory plan reads of s3://BUCKET/PREFIX into a directory below the second argument."""
    source, parent = sys.argv[1], Path(sys.argv[2])
    bucket, _, path = source.removeprefix(SCHEME).partition("/")
    prefix = f"{path}/" if path else ""
    errors = importlib.import_module("botocore.exceptions")
    try:
        client = _client()
        directory = fetch(client, bucket, prefix, parent)
    except (errors.BotoCoreError, errors.ClientError) as error:
        sys.exit(f"{source}: {type(error).__name__}: {error}")
    if not (directory / CONFIG).exists():
        sys.exit(
            f"{source}: NoSuchKey: there is no {CONFIG}; set model.source to the prefix that contains it"
        )
    sys.stdout.write(f"{MARK}{directory}\n")


def _client() -> Any:  # noqa: ANN401 - boto3 has no types
    """Return a client. It reads endpoint, region and credentials from the variables that vLLM uses."""
    config = importlib.import_module("botocore.config").Config
    style = "path" if os.environ.get(ADDRESSING_VARIABLE) == "0" else "auto"
    boto3 = importlib.import_module("boto3")
    return boto3.client("s3", config=config(s3={"addressing_style": style}))


def fetch(client: Any, bucket: str, prefix: str, parent: Path) -> Path:  # noqa: ANN401
    """Return a directory with the files and the headers of weights directly below the prefix."""
    name = hashlib.sha256(f"{bucket}/{prefix}".encode()).hexdigest()[:16]
    directory = parent / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for file, size in _listed(client, bucket, prefix):
        target = directory / file
        if file.endswith(WEIGHTS):
            _write_header(client, bucket, f"{prefix}{file}", size, target)
        elif any(fnmatch.fnmatch(file, pattern) for pattern in PATTERNS):
            client.download_file(bucket, f"{prefix}{file}", str(target))
    return directory


def _listed(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, int]]:  # noqa: ANN401
    """Yield the name and the size of each object directly below the prefix."""
    pages = client.get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"):
        for item in page.get("Contents", ()):
            if not item["Key"].endswith("/"):
                yield item["Key"].removeprefix(prefix), item["Size"]


def _write_header(client: Any, bucket: str, key: str, size: int, target: Path) -> None:  # noqa: ANN401
    with target.open("wb") as file:
        if size > LENGTH_BYTES:
            start = _read(client, bucket, key, 0, LENGTH_BYTES)
            (length,) = struct.unpack("<Q", start)
            file.write(start)
            if 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                file.write(_read(client, bucket, key, LENGTH_BYTES, length))
        file.truncate(size)


def _read(client: Any, bucket: str, key: str, start: int, length: int) -> bytes:  # noqa: ANN401
    wanted = f"bytes={start}-{start + length - 1}"
    body: bytes = client.get_object(Bucket=bucket, Key=key, Range=wanted)["Body"].read()
    return body


if __name__ == "__main__":
    main()
