"""vLLM called directly, one prompt at a time: python direct_vllm.py MODEL PROMPTS.json OUT.json

PROMPTS.json is a list of lists of token ids. Saves and prints the logprob of every prompt token but the first.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
from vllm import LLM, SamplingParams

model, prompts, out = sys.argv[1:]
llm = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=64 << 20)
scored = []
for ids in json.loads(Path(prompts).read_text()):
    (answer,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    scored.append([answer.prompt_logprobs[t][ids[t]].logprob for t in range(1, len(ids))])
Path(out).write_text(json.dumps(scored))
sys.stdout.write(Path(out).read_text() + "\n")
