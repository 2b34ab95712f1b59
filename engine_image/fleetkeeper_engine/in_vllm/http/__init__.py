"""The ASGI middleware, which runs in vLLM's API server process."""
