"""Layer 1: the children and the status of one service as pure decisions, (snapshot, now) -> plan."""
