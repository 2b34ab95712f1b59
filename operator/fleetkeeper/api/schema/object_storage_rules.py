"""The rules of models in object storage (s3://)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from fleetkeeper.api import types as t
from fleetkeeper.api.schema.rule import Rule, Schemes

_WITHOUT_CREDENTIALS = Schemes("hf", "pvc", "oci")


def is_object_source(source: str) -> bool:
    """Return True if the source is in object storage."""
    return source.startswith("s3://")


OBJECT_STORAGE_RULES: dict[type[BaseModel], tuple[Rule[Any], ...]] = {
    t.Adapter: (
        Rule[t.Adapter](
            "source",
            "!self.source.startsWith('s3://')",
            lambda of: not is_object_source(of.source),
            "adapters cannot be in s3://; use pvc:// or hf://",
        ),
    ),
    t.Model: (
        Rule[t.Model](
            "credentialsSecret",
            f"!has(self.credentialsSecret) || !{_WITHOUT_CREDENTIALS.cel}",
            lambda of: of.credentials_secret is None or not _WITHOUT_CREDENTIALS.has(of.source),
            "only an s3:// source uses credentials; remove credentialsSecret",
        ),
    ),
    t.InferenceServiceSpec: (
        Rule[t.InferenceServiceSpec](
            "model.credentialsSecret",
            "!self.model.source.startsWith('s3://') || has(self.model.credentialsSecret) || has(self.serviceAccountName)",
            lambda of: (
                not is_object_source(of.model.source)
                or of.model.credentials_secret is not None
                or of.service_account_name is not None
            ),
            "an s3:// source requires credentials; set credentialsSecret, or serviceAccountName for workload identity",
        ),
        Rule[t.InferenceServiceSpec](
            "engine.options",
            "!self.model.source.startsWith('s3://') || !('load-format' in self.engine.options)",
            lambda of: (
                not is_object_source(of.model.source) or "load-format" not in of.engine.options
            ),
            "load-format cannot be set with an s3:// source, whose weights are streamed; remove it",
        ),
    ),
}
