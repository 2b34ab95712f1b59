"""An engine that computes nothing: vLLM's interfaces, and steps that take the time of a fit."""
