"""The ASGI middleware that runs in vLLM's API server process."""
