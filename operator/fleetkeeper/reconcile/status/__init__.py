"""The status, conditions and events of a service."""
