"""A trace-driven simulator that runs plan.control unchanged."""
