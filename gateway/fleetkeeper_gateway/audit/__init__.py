"""The audit log of uses and changes of keys."""

from fleetkeeper_gateway.audit.log import StructuredAuditLog, create_audit_log

__all__ = ["StructuredAuditLog", "create_audit_log"]
