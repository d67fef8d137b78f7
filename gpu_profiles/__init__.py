"""GPU profiles, attention-kernel descriptors and engine profiles: numbers with their sources, and no model of anything."""

from gpu_profiles.load import (
    attention_kernel_ids,
    engine_ids,
    gpu_from_json,
    gpu_ids,
    gpu_to_json,
    load_attention_kernel,
    load_engine,
    load_gpu,
    resolve_gpu,
)
from gpu_profiles.schema import AttentionKernel, EngineLimits, EngineProfile, GpuProfile, Source

__all__ = [
    "AttentionKernel", "EngineLimits", "EngineProfile", "GpuProfile", "Source", "attention_kernel_ids", "engine_ids",
    "gpu_from_json", "gpu_ids", "gpu_to_json", "load_attention_kernel", "load_engine", "load_gpu", "resolve_gpu",
]  # fmt: skip
