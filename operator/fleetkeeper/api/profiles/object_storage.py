"""The object storage from which engines with a profile stream s3:// models."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from fleetkeeper.api.base import Section

HTTPS_PORT = 443
HTTP_PORT = 80
ENDPOINT = r"^https?://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[1-9][0-9]{0,4})?$"
Endpoint = Annotated[str, Field(max_length=253, pattern=ENDPOINT)]
Region = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9-]*$")]


class ObjectStorage(Section):
    """An S3 API. Services name a bucket and credentials, never the endpoint that receives them."""

    endpoint: Endpoint | None = Field(
        None,
        description="Address of the S3 API, for example https://minio.storage.svc:9000. Absent means Amazon S3.",
    )
    region: Region = Field(
        "us-east-1", description="Region of the buckets, for example eu-central-1."
    )
    path_style: bool = Field(
        False,
        description="Whether the name of the bucket is in the path of a URL, as MinIO and Ceph expect, instead of in its host.",
    )

    @property
    def port(self) -> int:
        """Return the TCP port of the endpoint."""
        address = urlsplit(self.endpoint or "https://")
        return address.port or (HTTP_PORT if address.scheme == "http" else HTTPS_PORT)
