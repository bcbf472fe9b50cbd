"""What vLLM made of its arguments: the part of its configuration that decides what it computes."""

from __future__ import annotations

from typing import Any


def effective(config: Any) -> dict[str, Any]:
    """What vLLM made of the arguments, by names that exist in 0.26.0 and 0.32.0; absent ones are null."""
    model, cache, compilation = config.model_config, config.cache_config, config.compilation_config
    scheduler = config.scheduler_config
    layers = list(compilation.static_forward_context.values())
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    mode = getattr(compilation, "mode", None)
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": str(getattr(model, "head_dtype", model.dtype)).removeprefix("torch."),
        "attention_backend": ", ".join(sorted(backends)) or None,
        "enforce_eager": model.enforce_eager,
        "compile_mode": getattr(mode, "name", None if mode is None else str(mode)),
        "cudagraph_mode": str(getattr(compilation, "cudagraph_mode", None)),
        "custom_ops": list(compilation.custom_ops),
        "logprobs_mode": str(model.logprobs_mode),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "chunked_prefill": bool(getattr(scheduler, "enable_chunked_prefill", False)),
        "async_scheduling": bool(getattr(scheduler, "async_scheduling", False)),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_model_len": model.max_model_len,
        "block_size": cache.block_size,
        "num_cache_blocks": cache.num_gpu_blocks,
        "cache_dtype": str(cache.cache_dtype),
        "quantization": model.quantization,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "seed": model.seed,
    }
