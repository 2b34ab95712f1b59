"""The step-time model, and the limits and replicas that it yields for a load."""
