"""Runs written through the product's own writer, shaped as compare and bisect write them, for the report tests.

The figures follow what was measured on a 135M Llama model (RMSNorm 21 %, RoPE 23 %, SwiGLU 0 % made locally; the
end-to-end share growing with depth); what they are does not matter here, only that a page shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from unit.attribution.synthetic import World

from rpadiag.attribution.attribute import attribute
from rpadiag.attribution.design import parts_of
from rpadiag.attribution.plan import Plan
from rpadiag.attribution.rows import attribution_rows, effect_rows, summary
from rpadiag.attribution.verdict import findings, verdict
from rpadiag.compare.metrics import logprob_metrics
from rpadiag.findings import Finding, Verdict
from rpadiag.runs import create_run
from rpadiag.sites import POINTS, all_sites, split_site

LOCAL_SHARE = {
    "input_norm": 0.21, "post_norm": 0.206, "final_norm": 0.202, "q_rope": 0.231, "k_rope": 0.228, "attn": 0.031, "o": 6e-5,
    "q": 2e-5, "k": 2e-5, "v": 1e-5,
}  # fmt: skip
WORDS = (
    " the",
    " model",
    " rounds",
    ",",
    " and",
    " a",
    "\n",
    " residual",
    " stream",
    " of",
    " tokens",
    ".",
    " It",
    " is",
    " stated",
    " that",
)


def write_compare(
    path: Path,
    *,
    num_layers: int = 4,
    num_prompts: int = 3,
    num_tokens: int = 48,
    generated: int = 12,
    kind: str = "rounding only",
    prompt_text: str = "A prompt.",
    odd_word: str = " strange",
    weight: str = "0f",
    spread: float = 1.0,
    decoded: bool = True,
    reduced: bool = False,
) -> Path:
    """A complete compare run, with the all-reduces of several ranks where ``reduced``; ``spread`` scales every difference, without ``decoded`` there is no text; ``odd_word`` is the token furthest apart, ``prompt_text`` the first prompt."""
    rng = np.random.default_rng(7)
    options = {
        "model": "smollm2-135m",
        "prompts": "prompts.txt",
        "run": path.name,
        "seed": 0,
        "dtype": "bfloat16",
        "generate": generated,
        "align": [],
        "sites": [],
    }
    with create_run(path, command="compare", options=options, given={"generate": generated}) as run:
        run.set_weights("trainer", {"model.embed_tokens.weight": weight})
        run.set_weights("rollout", {"model.embed_tokens.weight": weight})
        p_and_q, owner = [], []
        for prompt in range(num_prompts):
            ids = _token_ids(prompt, num_tokens + generated)
            run.add_prompts(
                [
                    {
                        "prompt": prompt,
                        "num_prompt_tokens": num_tokens,
                        "text": prompt_text if prompt == 0 else f"Prompt {prompt}",
                        "token_ids": ids,
                    }
                ]
            )
            columns = _token_columns(rng, prompt, ids, num_tokens, odd_word if prompt == 0 else None)
            columns["p"] = columns["q"] + spread * (columns["p"] - columns["q"])
            columns["text"] = columns["text"] if decoded else [None] * len(columns["text"])
            p_and_q.append((columns["p"], columns["q"]))
            owner.append(columns["prompt"])
            run.add_tokens(columns)
            for precision in ("model", "fp32"):
                run.add_sites(_site_rows(prompt, precision, num_layers, num_tokens, rng, spread))
            if reduced:
                run.add_sites(_reduced_rows(prompt, num_layers, num_tokens * 576))
        p, q = (np.concatenate(side) for side in zip(*p_and_q, strict=True))
        metrics = logprob_metrics(p, q, sequence_ids=np.concatenate(owner), p_argmax=p, q_argmax=p)
        run.set_metrics({"logprob": {"all": metrics, "prefill": metrics, "decode": metrics}, "floors": _floors(len(p))})
        run.set_manifest(
            trainer={"stack": "trainer", "engine": "transformers", "model": "smollm2-135m", "dtype": "bfloat16", "device": "cpu", "attention": "sdpa",
                     "versions": {"torch": "2.13.0+cpu", "transformers": "5.19.0"}, "aligned": None},
            rollout={"stack": "rollout", "engine": "vllm", "vllm_version": "0.32.0", "dtype": "bfloat16", "device": "cpu", "attention_backend": "CPU_ATTN"},
            rollout_label="vLLM 0.32.0",
            sites={"requested": [], "absent": {"q_norm": "this family has no per-head norm"}},
            control={"precision": "fp32", "reason": None, "num_tokens": len(p)},
        )  # fmt: skip
        for rank, text in enumerate(_findings_text(len(p))):
            run.add_finding(
                Finding(
                    code="local-divergence",
                    severity=("warning", "warning", "info")[min(rank, 2)],
                    text=text,
                    region=("rope", "rmsnorm", None)[min(rank, 2)],
                    rank=rank,
                )
            )
        run.set_verdict(Verdict(
            kind=kind,
            sentence=f"Rounding only: trainer and vLLM 0.32.0 compute the same function (in FP32 the stacks agree to 1e-05 nats) and differ by 0.039 nats "
            f"per token (mean |d|, n = {len(p)}) because they round at different points; it is made in RoPE (23 % of elements), residual RMSNorm (21 % of elements).",
            site="layers.0.input_norm",
        ))  # fmt: skip
    return path


def _token_ids(prompt: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(100 + prompt).integers(0, len(WORDS), 512)[:n]]


def _token_columns(
    rng: np.random.Generator, prompt: int, ids: list[int], num_prompt_tokens: int, odd_word: str | None
) -> dict[str, Any]:
    n = len(ids) - 1
    q = -rng.exponential(1.9, n)
    d = rng.standard_t(4, n) * 0.012 * np.sqrt(1 + 2 * np.abs(q))
    d[:3] = 0.0
    text = [WORDS[i] for i in ids[1:]]
    if odd_word is not None:
        where = n // 2
        d[where], q[where], text[where] = -0.61, -7.3, odd_word
    position = np.arange(1, n + 1, dtype=np.int32)
    flip = rng.random(n) < 0.01
    return {
        "prompt": np.full(n, prompt, dtype=np.int32), "position": position, "token": np.asarray(ids[1:], dtype=np.int32), "text": text,
        "source": np.where(position >= num_prompt_tokens, "decode", "prefill").tolist(),
        "p": (q + d).astype(np.float32), "q": q.astype(np.float32),
        "p_entropy": np.full(n, 2.1, np.float32), "q_entropy": np.full(n, 2.1, np.float32),
        "p_rank": np.maximum(1, (np.exp(-q) * 0.7).astype(np.int32)), "q_rank": np.maximum(1, (np.exp(-q) * 0.7).astype(np.int32)),
        "p_argmax": np.asarray(ids[1:], dtype=np.int32) + flip, "q_argmax": np.asarray(ids[1:], dtype=np.int32),
    }  # fmt: skip


def _site_rows(
    prompt: int, precision: str, num_layers: int, num_tokens: int, rng: np.random.Generator, spread: float
) -> list[dict[str, Any]]:
    rows = []
    for site in all_sites(num_layers, qk_norm=False):
        layer, point = split_site(site)
        depth = num_layers if layer is None else layer
        fp32 = precision == "fp32"
        n = num_tokens * 576
        local = (0.6 if point.endswith("norm") or "rope" in point else 0.3) if fp32 else LOCAL_SHARE.get(point, 0.0)
        local *= 1 + 0.05 * rng.standard_normal()
        total = 0.0 if point == "embed" else max(local, 0.93 - 0.72 * float(np.exp(-3.0 * (depth + 0.3) / num_layers)))
        local, total = (local, total) if spread else (0.0, 0.0)
        scale = 1e-5 if fp32 else 1.0
        row: dict[str, Any] = {
            "prompt": prompt, "precision": precision, "source": "prefill", "layer": layer, "site": site, "point": point, "region": POINTS[point].region,
            "pair": "trainer|rollout",
            **_ulp(n, total, 0.003 * (1 + 9 * depth / num_layers) * scale if total else 0.0, ""),
        }  # fmt: skip
        if point == "embed":
            row["local_reason"] = "nothing to feed: it reads token ids"
        else:
            row |= _ulp(
                n,
                local,
                2.1e-3 * scale * 0.05 * np.sqrt(local / 0.2) if fp32 else 2.1e-3 * np.sqrt(local / 0.2),
                "local_",
            )
            row["inherited_differing"] = max(total - local, 0.0)
        rows.append(row)
    return rows


def _reduced_rows(prompt: int, num_layers: int, n: int) -> list[dict[str, Any]]:
    """Rows of the all-reduces, which the trainer lacks: local columns alone."""
    return [
        {
            "prompt": prompt, "precision": "model", "source": "prefill", "layer": layer, "site": f"layers.{layer}.{point}", "point": point,
            "region": "all_reduce", "pair": "trainer|rollout", **_ulp(n, 0.0, 0.0, "local_"),
        }
        for layer in range(num_layers) for point in ("o_reduce", "down_reduce")
    ]  # fmt: skip


def _ulp(n: int, share: float, rel_l2: float, prefix: str) -> dict[str, Any]:
    differing = round(n * share)
    values = {
        "n": n, "num_differing": differing, "differing": differing / n, "max_ulp": 2 if differing else 0, "mean_signed_ulp": 0.001, "mean_magnitude_ulp": 0.0,
        "sign_balance": 0.01, "magnitude_balance": 0.0, "ulp_hist": [n - differing, differing] + [0] * 15, "rel_l2": float(rel_l2), "cosine": 1.0,
        "num_nonfinite_trainer": 0, "num_nonfinite_rollout": 0,
    }  # fmt: skip
    return {prefix + k: v for k, v in values.items()}


def _floors(n: int) -> list[dict[str, Any]]:
    rows = (("trainer_padded", "trainer", "alone against in a padded batch", 0.037), ("rollout_batched", "rollout", "alone against in a batch", 0.0371),
            ("rollout_rescored", "rollout", "sampled against rescored as a prompt", 0.0385))  # fmt: skip
    return [
        {
            "name": a,
            "stack": b,
            "text": c,
            "mean_abs_d": v,
            "max_abs_d": 20 * v,
            "k3_kl": 2e-3,
            "exact_share": 0.01,
            "num_tokens": n,
        }
        for a, b, c, v in rows
    ]


def _findings_text(n: int) -> list[str]:
    return [
        f"RoPE makes 23.0 % of its elements differ when fed the same input (n = {n * 960}, largest 1 ULP).",
        f"residual RMSNorm makes 20.8 % of its elements differ when fed the same input (n = {n * 576}, largest 2 ULP).",
        f"FP32 control: mean |d| 1.0e-05 nats (n = {n}) against 3.9e-02 in bfloat16; largest local relative L2 1.2e-07 at layers.3.q_rope.",
        "attention makes 3.1 % of its elements differ when fed the same input.",
        "The first divergent site is layers.0.input_norm.",
        "The gap is no larger than each stack's own noise floor.",
    ]


def write_bisect(
    path: Path,
    *,
    num_prompts: int = 3,
    num_tokens: int = 48,
    generated: int = 12,
    ranked: bool = True,
    weight: str = "0f",
    num_sequences: int = 30,
) -> Path:
    """A complete bisect run of the same prompts as :func:`write_compare`. num_sequences: those that its errors come from."""
    with create_run(
        path,
        command="bisect",
        options={
            "model": "smollm2-135m",
            "prompts": "prompts.txt",
            "run": path.name,
            "regions": ["rope", "swiglu", "rmsnorm"],
            "replicates": 32,
        },
    ) as run:
        run.set_weights("trainer", {"model.embed_tokens.weight": weight})
        run.add_prompts(
            [
                {
                    "prompt": i,
                    "num_prompt_tokens": num_tokens,
                    "text": None,
                    "token_ids": _token_ids(i, num_tokens + generated),
                }
                for i in range(num_prompts)
            ]
        )
        # the measured figures of one 135M model, as systematic parts of a synthetic one
        parts = parts_of(("rope", "swiglu", "rmsnorm"))
        world = World(parts=parts, systematic={"rmsnorm": 0.013, "rope": 0.0073, "swiglu": 0.0036}, num_sequences=num_sequences, num_tokens=90,
                      control_shift=0.0 if ranked else 0.02)  # fmt: skip
        plan = Plan(parts=parts, num_replicates=16, interactions=True, confirm=True)
        local = {"rmsnorm": 0.208, "rope": 0.23, "swiglu": 0.0}
        result = attribute(world.score, plan, world.sequence_ids, local_differing=local)
        told = findings(result)
        run.add_attribution(attribution_rows(result))
        run.add_effects(effect_rows(result))
        run.set_metrics({"attribution": summary(result)})
        run.set_manifest(
            trainer={
                "stack": "trainer",
                "model": "smollm2-135m",
                "dtype": "bfloat16",
                "device": "cpu",
                "attention": "sdpa",
                "versions": {"torch": "2.13.0+cpu"},
            }
        )
        for finding in told:
            run.add_finding(finding)
        run.set_verdict(verdict(result, told))
    return path
