"""vLLM's EngineCore with its asynchronous scheduler, in one process without a model or a device.

The engine's Python runs it (`python -m tests.support.vllm_core.run`), because vLLM is only there.
"""
