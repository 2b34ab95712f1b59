"""The CustomResourceDefinition, built from the models and the rules."""

from __future__ import annotations

from typing import Any

import yaml

from fleetkeeper.api import names
from fleetkeeper.api.schema.openapi import object_schema, rule_schema
from fleetkeeper.api.schema.rules import NAME_RULES
from fleetkeeper.api.status import InferenceServiceStatus
from fleetkeeper.api.types import InferenceServiceSpec

PATH = f"crds/{names.PLURAL}.{names.GROUP}.yaml"
SHORT_COLUMN, WIDE_COLUMN = 0, 1

_COLUMNS: tuple[tuple[str, str, str, int, str], ...] = (
    ("READY", "string", ".status.summary.ready", SHORT_COLUMN, "Ready and desired replicas."),
    ("WANTED", "integer", ".status.scaling.desired", SHORT_COLUMN, "Desired replicas."),
    ("SUSPEND", "boolean", ".spec.suspend", SHORT_COLUMN, "Whether the service runs without replicas."),
    ("SEQUENCES", "integer", ".status.batching.sequences", SHORT_COLUMN, "Limit of sequences in a batch."),
    ("TOKENS", "integer", ".status.batching.tokens", SHORT_COLUMN, "Limit of tokens in an engine step."),
    ("BREAKER", "string", ".status.summary.breaker", SHORT_COLUMN, "Circuit breaker that is not closed."),
    ("AGE", "date", ".metadata.creationTimestamp", SHORT_COLUMN, "Time since the service was created."),
    ("REASON", "string", '.status.conditions[?(@.type=="Ready")].reason', WIDE_COLUMN, "Reason of the condition Ready."),
    ("DEGRADED", "string", '.status.conditions[?(@.type=="Degraded")].reason', WIDE_COLUMN, "Reason of the condition Degraded."),
    ("AVAILABLE", "integer", ".status.availableReplicas", WIDE_COLUMN, "Replicas that a rollout counts."),
    ("QUEUE-WAIT-MS", "integer", ".spec.objectives.queueWaitMilliseconds", WIDE_COLUMN, "Objective for queue wait in milliseconds."),
    ("BATCH-TIME-MS", "integer", ".spec.objectives.batchTimeMilliseconds", WIDE_COLUMN, "Objective for batch time in milliseconds."),
    ("ENGINE", "string", ".status.engine.profile", WIDE_COLUMN, "Engine profile in use."),
    ("URL", "string", ".status.url", WIDE_COLUMN, "URL inside the cluster."),
)  # fmt: skip


def desired_crd() -> dict[str, Any]:
    """Return the manifest of the CRD."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": names.CRD_NAME,
            "labels": {"app.kubernetes.io/name": "fleetkeeper"},
        },
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": names.LIST_KIND,
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": ["fleetkeeper"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": root_schema()},
                }
            ],
        },
    }


def root_schema() -> dict[str, Any]:
    """Return the OpenAPI schema of the whole object."""
    return {
        "type": "object",
        "description": "A fleet of vLLM engines behind one URL. Fleetkeeper adjusts batch limits and replicas to meet objectives for queue wait and batch time, and caps memory.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {
                "type": "string",
                "maxLength": 64,
                "description": "fleetkeeper.io/v1alpha1.",
            },
            "kind": {"type": "string", "maxLength": 64, "description": "InferenceService."},
            "metadata": {"type": "object"},
            "spec": {"description": "Desired state.", **object_schema(InferenceServiceSpec)},
            "status": {
                "description": "Observed state. Fleetkeeper writes it.",
                "default": dict(names.UNWRITTEN_STATUS),
                **object_schema(InferenceServiceStatus),
            },
        },
        "x-kubernetes-validations": [rule_schema(rule) for rule in NAME_RULES],
    }


def _column(name: str, kind: str, path: str, priority: int, text: str) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path, "description": text}
    return {**column, "priority": priority} if priority else column


class _Dumper(yaml.SafeDumper):
    """A dumper that repeats shared values instead of writing anchors, which are hard to read."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the base class' signature
        """Return True: write no anchors."""
        return True


def crd_text() -> str:
    """Return the CRD as YAML."""
    body = yaml.dump(desired_crd(), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return f"# Generated by `make generate` from fleetkeeper.api; do not edit.\n{body}"


def generated_files() -> dict[str, str]:
    """Return {path: text} for scripts/generate.py."""
    return {PATH: crd_text()}
