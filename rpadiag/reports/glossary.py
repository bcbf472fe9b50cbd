"""What each logprob metric says, for readers who meet its name for the first time.

Names and formulas are verl's; ``prime-rl`` and ``NeMo-RL`` names are given where they differ. p is the trainer's
log-probability of a token, q the rollout's, d = p - q, and the ratio is exp(d), unclamped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: unit, what it says, and how its value is written (``number``, ``count`` or ``percent``)."""

    name: str
    unit: str
    text: str
    form: str = "number"


METRICS: tuple[Metric, ...] = (
    Metric(name="num_tokens", unit="tokens", text="Tokens that both stacks scored.", form="count"),
    Metric(name="num_sequences", unit="sequences", text="Sequences that these tokens belong to.", form="count"),
    Metric(name="num_nonfinite", unit="tokens", text="Tokens left out because a log-probability is NaN or infinite.", form="count"),
    Metric(name="mean_abs_d", unit="nats", text="Mean |d|: how far a typical token is apart."),
    Metric(name="rms_d", unit="nats", text="Root mean square of d."),
    Metric(name="max_abs_d", unit="nats", text="Largest |d| of a single token."),
    Metric(name="exact_share", unit="of tokens", text="Tokens whose log-probabilities agree to the last bit.", form="percent"),
    Metric(name="kl", unit="nats", text="mean(q \u2212 p): simple estimate of KL(rollout \u2016 trainer); may be negative."),
    Metric(name="k3_kl", unit="nats", text="mean(exp(d) \u2212 1 \u2212 d): the same KL with less variance (prime-rl mismatch_kl, NeMo-RL gen_kl_error)."),
    Metric(name="training_ppl", unit="", text="Perplexity under the trainer, mean over sequences."),
    Metric(name="training_log_ppl", unit="nats", text="Its logarithm, mean over sequences."),
    Metric(name="rollout_ppl", unit="", text="Perplexity under the rollout engine, mean over sequences."),
    Metric(name="rollout_log_ppl", unit="nats", text="Its logarithm, mean over sequences."),
    Metric(name="log_ppl_diff", unit="nats", text="log(trainer perplexity / rollout perplexity), mean over sequences; positive: the trainer finds the text less likely."),
    Metric(name="log_ppl_abs_diff", unit="nats", text="The same, absolute value per sequence before the mean."),
    Metric(name="log_ppl_diff_max", unit="nats", text="Largest of the sequences."),
    Metric(name="log_ppl_diff_min", unit="nats", text="Smallest of the sequences."),
    Metric(name="ppl_ratio", unit="", text="Trainer perplexity over rollout perplexity, mean over sequences."),
    Metric(name="chi2_token", unit="", text="mean(ratio\u00b2) \u2212 1 over tokens: how heavy the tails of the importance ratio are."),
    Metric(name="chi2_seq", unit="", text="The same for whole sequences, whose ratio is the product over tokens."),
    Metric(name="rollout_is_mean", unit="", text="Mean importance ratio; 1 when the stacks agree."),
    Metric(name="rollout_is_std", unit="", text="Standard deviation of the importance ratio."),
    Metric(name="rollout_is_min", unit="", text="Smallest importance ratio of a token."),
    Metric(name="rollout_is_max", unit="", text="Largest importance ratio of a token."),
    Metric(name="rollout_is_eff_sample_size", unit="", text="Effective sample size over n: the share of tokens that importance weighting leaves."),
    Metric(name="rollout_probs_diff_mean", unit="", text="Mean |exp(p) \u2212 exp(q)|: difference in probability, not log-probability."),
    Metric(name="rollout_probs_diff_max", unit="", text="Largest difference in probability."),
    Metric(name="rollout_probs_diff_std", unit="", text="Standard deviation of the difference in probability."),
    Metric(name="rollout_actor_probs_pearson_corr", unit="", text="Pearson correlation of the two probabilities."),
    Metric(name="outside_ratio_share", unit="of tokens", text="Tokens whose ratio is outside [0.8, 1.2], the usual clipping range.", form="percent"),
    Metric(name="argmax_flips", unit="tokens", text="Tokens where the two stacks prefer different next tokens.", form="count"),
    Metric(name="argmax_flip_share", unit="of tokens", text="The same as a share.", form="percent"),
)  # fmt: skip
BY_NAME = {m.name: m for m in METRICS}
