"""Supervises one vLLM inside its pod. Never imports the operator."""
