"""Pid 1 of an engine pod: prepares the start, watches vLLM, and ends it cleanly."""
