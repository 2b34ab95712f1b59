"""The audit log: who used or changed which key, when, and how it ended."""

from fleetkeeper_gateway.audit.log import StructuredAuditLog, create_audit_log

__all__ = ["StructuredAuditLog", "create_audit_log"]
