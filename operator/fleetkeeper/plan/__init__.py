"""L1: pure decisions, (snapshot, now) -> plan."""
