"""Code that runs inside vLLM: in EngineCore and its workers, and under `http` in the API server."""
