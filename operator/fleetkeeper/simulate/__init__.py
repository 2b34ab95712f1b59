"""A trace-driven simulator that runs autoscale unchanged."""
