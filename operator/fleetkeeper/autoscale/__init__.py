"""Layer 1: replicas, batch limits and admission as pure decisions, (samples, memory, now) -> decision."""
