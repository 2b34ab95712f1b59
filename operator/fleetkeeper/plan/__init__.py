"""Layer 1: pure decisions, (snapshot, now) -> plan."""
