"""Admission of requests into vLLM, and their order. Pure."""
