"""vLLM's OpenAI API in front of a simulated engine: plain ASGI."""
