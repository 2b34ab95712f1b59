"""L2: one module a world outside."""
