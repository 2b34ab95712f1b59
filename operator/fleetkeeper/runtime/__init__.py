"""L3: the operator process, which connects events, plans and adapters."""
