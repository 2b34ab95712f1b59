"""Settings of the process `batch` (docs/reference/gateway-settings.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class BatchSettings(BaseSettings):
    """Settings of the store, of the upstream of lines, and of the quotas of keys."""

    model_config = SettingsConfigDict(
        env_prefix="FLEETKEEPER_GATEWAY_",
        env_ignore_empty=True,
        extra="ignore",
        hide_input_in_errors=True,
        frozen=True,
    )

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104 - a pod
    batch_port: int = Field(8083, ge=0, le=65_535, description="Port of files and batches.")
    batch_admin_port: int = Field(
        8084, ge=0, le=65_535, description="Port of health and metrics of the batch process."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines."
    )
    log_format: Literal["json", "console"] = Field("json", description="Format of log lines.")
    batch_store: str = Field(
        "file:///var/lib/fleetkeeper/batch",
        description="Where files and results are kept: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or file:///DIRECTORY. Credentials of object stores come from their usual variables.",
    )
    batch_store_shared: bool = Field(
        False,
        description="Whether a file:// directory is a volume that all replicas share. Otherwise a second replica does not start.",
    )
    batch_store_timeout_seconds: float = Field(
        30, gt=0, description="Maximum time of one call to the store."
    )
    batch_upstream: str = Field(
        "",
        description="Base URL of the OpenAI-compatible API that answers lines, without /v1: the gateway, or any other.",
    )
    batch_upstream_key_file: Path | None = Field(
        None,
        description="File with the API key for the upstream. Empty: the upstream is a gateway of Fleetkeeper, and lines are sent on behalf of their key.",
    )
    batch_redis_url: SecretStr = Field(
        SecretStr(""),
        description="Redis or Valkey of the queue: redis://HOST:PORT/DATABASE, or rediss:// for TLS. Its other settings are those of REDIS_URL, which is the default.",
    )
    batch_concurrency: int = Field(
        1024,
        ge=1,
        le=4096,
        description="Maximum lines of one replica that run at the same time, in all its processes.",
    )
    batch_processes: int = Field(
        4, ge=1, le=32, description="Processes of one replica that send lines and handle answers."
    )
    batch_process_bytes: int = Field(
        536_870_912,
        ge=134_217_728,
        description="Maximum bytes of data of each such process (RLIMIT_DATA). A process that needs more ends, and is replaced.",
    )
    batch_answer_bytes: int = Field(
        8_388_608,
        ge=1024,
        le=15_728_640,
        description="Maximum bytes of the answer to one line. A longer answer is the error answer_too_large.",
    )
    batch_line_timeout_seconds: float = Field(
        3600, gt=0, description="Maximum time of one line from its sending to its whole answer."
    )
    batch_end_seconds: float = Field(
        60,
        ge=0,
        description="Time for running lines to end after their batch was cancelled or expired.",
    )
    batch_drain_seconds: float = Field(
        30, ge=0, description="Time for running lines to end after a SIGTERM."
    )
    batch_retention_days: int = Field(
        30, ge=1, le=3650, description="Days after which files and ended batches are deleted."
    )
    batch_key_files: int = Field(10_000, ge=1, description="Maximum files of one key.")
    batch_key_bytes: int = Field(
        5_368_709_120, ge=1, description="Maximum bytes of all files of one key."
    )
    batch_key_active: int = Field(
        2000, ge=1, description="Maximum batches of one key that have not ended."
    )
    batch_key_lines: int = Field(
        2_000_000,
        ge=50_000,
        description="Maximum lines of all batches of one key that have not ended.",
    )
    batch_key_batches: int = Field(
        10_000,
        ge=1,
        description="Maximum batches of one key. Those that ended first are deleted for new ones.",
    )
    batch_key_calls: int = Field(
        3000,
        ge=1,
        description="Maximum calls of one key a minute about files and batches, for each replica.",
    )
