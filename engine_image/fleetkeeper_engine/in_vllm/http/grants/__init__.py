"""Grants: what a gateway signed for one request, checked in front of vLLM's routes."""
