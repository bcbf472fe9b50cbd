"""What the recipes of examples/verl do inside the installed verl, in a process of its own: ``verl_checks.py metrics|align MODEL OUT``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def metrics(out: Path) -> dict[str, Any]:
    """One batch through verl's own debug metrics, which the external module of the environment has taken over."""
    from unit.rollouts.recorded import record, rows
    from verl import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    records = rows(record(num_sequences=16, num_tokens=40), "verl")
    columns = (
        "prompts",
        "responses",
        "attention_mask",
        "response_mask",
        "position_ids",
        "rollout_log_probs",
        "old_log_probs",
    )
    width = {c: max(len(r[c]) for r in records) for c in columns}
    batch = {c: torch.tensor([r[c] + [0] * (width[c] - len(r[c])) for r in records]) for c in columns}
    # Responses of unlike length move what follows the prompt; the mask over both is made anew.
    real = torch.cat([batch["prompts"] != 0, batch["response_mask"] == 1], dim=1).long()
    batch |= {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    whole = calculate_debug_metrics(DataProto.from_single_dict(batch))
    v1 = ("responses", "response_mask", "rollout_log_probs", "old_log_probs")
    alone = calculate_debug_metrics(DataProto.from_single_dict({c: batch[c] for c in v1}))
    return {"whole": whole, "responses_alone": alone}


def align(model: str) -> dict[str, Any]:
    """The model that verl's FSDP engine builds; the engine itself wants CUDA or an NPU, so FSDP is left out."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29778"}
    sys.modules["trl"] = None  # type: ignore[assignment]  # verl 0.9.1 looks for a class in it that TRL 1.16 no longer has
    torch.distributed.init_process_group("gloo")
    from transformers import AutoModelForCausalLM
    from verl.workers.config import HFModelConfig
    from verl.workers.config.engine import FSDPEngineConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    import rpadiag

    engine: Any = object.__new__(FSDPEngineWithLMHead)
    engine.model_config = HFModelConfig(
        path=model, external_lib="rpadiag_verl_align", override_config={"attn_implementation": "sdpa"}
    )
    engine.engine_config = FSDPEngineConfig(strategy="fsdp2", model_dtype="bf16")
    engine.device_mesh, engine.use_remove_padding, engine.ulysses_sequence_parallel_size = None, False, 1
    built = engine._build_module()
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        unaligned = own(input_ids=ids).logits
        rpadiag.align(own, regions=("rope", "swiglu"), contract="fp32-output")
        expected, found = own(input_ids=ids).logits, built.eval()(input_ids=ids).logits
    return {
        "aligned": sorted({type(m).__name__ for m in built.modules() if hasattr(m.forward, "_rpadiag_aligned")}),
        "equal": torch.equal(expected, found),
        "frequencies": str(built.model.rotary_emb.inv_freq.dtype),
        "unlike_the_unaligned": not torch.equal(unaligned, found),
        "dtype": str(found.dtype),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    which, checkpoint, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    answer = metrics(directory) if which == "metrics" else align(checkpoint)
    (directory / "result.json").write_text(json.dumps(answer), encoding="utf-8")
