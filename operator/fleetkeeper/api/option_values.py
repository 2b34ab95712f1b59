"""The values that options of vLLM 0.31 and 0.32 accept."""

from __future__ import annotations

from typing import Final

PARTNERS: Final = (
    ("enable-auto-tool-choice", "tool-call-parser"),
    ("spec-method", "spec-tokens"),
    ("spec-tokens", "spec-method"),
)
"""Pairs of (option, option that it requires)."""

ATTENTION_BACKENDS: Final = (
    "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TRITON_FLASH_ATTN",
    "TORCH_SDPA", "FLASHINFER", "TRITON_FLASHINFER", "FLASHINFER_MLA", "TOKENSPEED_MLA",
    "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90",
    "TRITON_MLA", "CUTLASS_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4",
    "FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41", "FLASHINFER_MLA_SPARSE_DSV41",
    "FLASHMLA_MEGA_ATTN_DSV41", "B12X", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE",
    "MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA", "FLEX_ATTENTION", "HPC_ATTN", "CPU_ATTN",
    "CPU_MLA", "AMX_MLA", "TURBOQUANT", "ULTRAQUANT",
)  # fmt: skip
"""Attention backends, except those for other platforms and the one that loads custom code."""

MOE_BACKENDS: Final = (
    "aiter", "aiter_mega_moe", "aiter_triton_mxfp4_bf16", "auto", "b12x", "batched_triton",
    "cutlass", "deep_gemm", "deep_gemm_mega_moe", "emulation", "flashinfer_b12x",
    "flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_moe_ep_cutedsl",
    "flashinfer_moe_ep_mega_deep_gemm", "flashinfer_trtllm", "flydsl", "hpc", "humming", "marlin",
    "rdna3", "triton", "triton_unfused",
)  # fmt: skip
"""Backends of mixture-of-experts layers."""

LINEAR_BACKENDS: Final = (
    "aiter", "auto", "b12x", "conch", "cutlass", "deep_gemm", "emulation", "exllama", "fbgemm",
    "flashinfer_b12x", "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_cutlass",
    "flashinfer_trtllm", "humming", "machete", "marlin", "torch", "triton", "xpu", "xpu_woq",
)  # fmt: skip
"""Backends of linear layers."""

TOOL_PARSERS: Final = (
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "deepseek_v4", "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3",
    "glm45", "glm47", "granite", "granite-20b-fc", "granite4", "hermes", "hf", "hunyuan_a13b",
    "hy_v3", "hy_v4", "inkling", "internlm", "jamba", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2",
    "ling3", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo", "minicpm5",
    "minimax_m2", "minimax_m3", "mistral", "muse_glimmer", "olmo3", "openai", "phi4_mini_json",
    "plamo3", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss",
    "step3", "step3p5", "xlam",
)  # fmt: skip
"""The tool call parsers of vLLM."""

REASONING_PARSERS: Final = (
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4",
    "deepseek_v41", "ernie45", "gemma4", "glm45", "glm47", "granite", "granite_thinking_parser",
    "hf", "holo2", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "k2_horizon", "kimi_k2", "kimi_k3",
    "ling3", "mimo", "minicpmv", "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral",
    "muse_glimmer", "nemotron_v3", "olmo3", "openai_gptoss", "plamo3", "poolside_v1", "qwen3",
    "seed_oss", "step3", "step3p5",
)  # fmt: skip
"""The reasoning parsers of vLLM."""
