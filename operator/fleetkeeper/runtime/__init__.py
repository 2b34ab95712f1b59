"""L3: glue between events, plans and adapters."""
