"""The end of every command's ``--help``: commands to copy. A test parses each of them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "compare": (
        "rpadiag compare smollm2-135m prompts.txt --run runs/compare",
        "rpadiag compare Qwen/Qwen3-0.6B prompts.jsonl --run runs/aligned --align all --contract vllm-eager",
        "rpadiag compare checkpoint prompts.txt --run runs/sampled --generate 64 --temperature 0.7",
        "rpadiag compare checkpoint prompts.txt --run runs/rope --sites q_rope --sites k_rope --control none",
        "rpadiag compare --trainer bundles/trainer --rollout bundles/vllm --run runs/bundles",
    ),
    "bisect": (
        "rpadiag bisect smollm2-135m prompts.txt --run runs/bisect --replicates 32",
        "rpadiag bisect checkpoint prompts.txt --run runs/layers --by region,layer:4 --precision 0.2",
        "rpadiag bisect checkpoint prompts.txt --run runs/engine --rollout vllm --regions rope,rmsnorm,attention",
        "rpadiag bisect checkpoint prompts.txt --run runs/bisect --replicates 32 --resume",
    ),
    "capture": (
        "rpadiag capture checkpoint prompts.txt --engine vllm --bundle bundles/vllm --generate 32",
        "rpadiag capture checkpoint bundles/vllm --engine trainer --bundle bundles/trainer",
    ),
    "fingerprint": (
        "rpadiag fingerprint runs/compare",
        "rpadiag fingerprint checkpoint prompts.txt --stack rollout --output contract.json",
        "rpadiag fingerprint bundles/vllm --regions rope,rmsnorm --format json",
    ),
    "report": (
        "rpadiag report runs/compare runs/bisect --html report.html",
        "rpadiag report runs/monday runs/tuesday runs/now --html report.html",
        "rpadiag report runs/now --gate 'k3_kl<=1e-3' --gate 'first_divergent_site==none'",
        "rpadiag report runs/now --policy gates.toml --baseline runs/good --junit gates.xml",
        "rpadiag report runs/now --history runs --html report.html",
    ),
    "rollouts": (
        "rpadiag rollouts token_exports/step_40 --run runs/step-40",
        "rpadiag rollouts train_data_step40.jsonl --schema nemo-rl --format json",
        "rpadiag rollouts rollouts.jsonl --model checkpoints/step_40 --temperature 0.7",
    ),
    "demo": ("rpadiag demo",),
    "doctor": ("rpadiag doctor", "rpadiag doctor --format json"),
}


def examples(command: str) -> str:
    """The epilog of a command: its examples, a line each; ``\\b`` keeps the lines."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])))
