"""Which requests may enter vLLM, and in which order. Pure."""
