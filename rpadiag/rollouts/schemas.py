"""Where each trainer keeps token ids, masks and log-probabilities in a record of one sequence.

One rule covers all of them: a list of R log-probabilities belongs to the *last* R tokens of the sequence. For prime-rl and NeMo-RL
R is the whole sequence, for OpenRLHF all but the first token, for the others the response. Names and shapes were
read in the sources that ``source`` cites. None of these trainers writes log-probabilities anywhere by default but prime-rl
(``enable_token_export``) and NeMo-RL (``train_data_step*.jsonl``); docs/rollouts.md has the lines that save them for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rpadiag.errors import InputError, UsageError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns of one trainer's records. Every name is a column of the file.

    ids: token ids; two columns are joined (prompt, response). rollout: q, required. trainer: p; a file without it
    has to be scored. mask: 1 where a token counts, as long as the log-probabilities or the sequence; several are multiplied.
    attention: 1 at real tokens, as long as the sequence (two columns joined as the ids are). length: real tokens of a right-padded
    sequence. response_length: tokens of the response. weight: 1 if the sequence counts. positions: position ids.
    rollout_ids: the ids that the rollout engine itself had, where they are recorded beside the trainer's. step: trainer step.
    version: step of the weights that the rollout engine sampled with. temperature: that the rollout sampled with.
    cached: prompt tokens that came from the prefix cache.
    """

    name: str
    source: str
    ids: tuple[str, ...]
    rollout: str
    trainer: str
    mask: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    length: str | None = None
    response_length: str | None = None
    weight: str | None = None
    positions: str | None = None
    rollout_ids: str | None = None
    step: str | None = None
    version: str | None = None
    temperature: str | None = None
    cached: str | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        return (*self.ids, self.rollout)

    @property
    def lists(self) -> tuple[str, ...]:
        """Columns with one value for each token."""
        optional = (*self.mask, *self.attention, self.trainer, self.positions, self.rollout_ids)
        return (*self.needed, *(c for c in optional if c is not None))

    @property
    def scalars(self) -> tuple[str, ...]:
        """Columns with one value for each sequence."""
        every = (self.length, self.response_length, self.weight, self.step, self.version, self.temperature, self.cached)
        return tuple(c for c in every if c is not None)


SCHEMAS: tuple[Schema, ...] = (
    Schema(
        name="prime-rl",
        source="PrimeIntellect-ai/prime-rl 0.8.0 at 559b4477, src/prime_rl/trainer/rl/token_export.py: token_exports/step_N/rank_R.jsonl",
        ids=("token_ids",),
        rollout="inference_logprobs",
        trainer="trainer_logprobs",
        mask=("loss_mask",),
        positions="position_ids",
        step="step",
    ),
    Schema(
        name="nemo-rl",
        source="NVIDIA-NeMo/RL 0.6.0 at 7ea279ab, nemo_rl/algorithms/grpo.py and utils/logger.py: train_data_stepN.jsonl",
        ids=("token_ids",),
        rollout="generation_logprobs",
        trainer="prev_logprobs",
        mask=("token_loss_mask",),
        weight="sample_loss_mask",
        length="input_lengths",
    ),
    Schema(
        name="verl",
        source="verl-project/verl 0.10.0.dev at 1dda039b, DataProto fields of verl/trainer/ppo/ray_trainer.py and utils/debug/metrics.py",
        ids=("prompts", "responses"),
        rollout="rollout_log_probs",
        trainer="old_log_probs",
        mask=("response_mask",),
        attention=("attention_mask",),
        positions="position_ids",
    ),
    Schema(
        name="trl",
        source="huggingface/trl 1.10.0.dev0 at f2cd5771, output of GRPOTrainer._generate_and_score_completions in trl/trainer/grpo_trainer.py",
        ids=("prompt_ids", "completion_ids"),
        rollout="sampling_per_token_logps",
        trainer="old_per_token_logps",
        mask=("completion_mask", "tool_mask"),
        attention=("prompt_mask", "completion_mask"),
    ),
    Schema(
        name="skyrl",
        source="NovaSky-AI/SkyRL at a9564572, TrainingInput in skyrl/backends/skyrl_train/training_batch.py",
        ids=("sequences",),
        rollout="rollout_logprobs",
        trainer="action_log_probs",
        mask=("loss_mask", "response_mask"),
        attention=("attention_mask",),
    ),
    Schema(
        name="openrlhf",
        source="OpenRLHF/OpenRLHF 0.11.0 at 3c3be623, Experience in openrlhf/trainer/ppo_utils/experience.py",
        ids=("sequences",),
        rollout="rollout_log_probs",
        trainer="action_log_probs",
        mask=("action_mask",),
        attention=("attention_mask",),
    ),
    Schema(
        name="slime",
        source="THUDM/slime 0.3.1 at 624b824a, Sample in slime/utils/types.py and samples of slime/observability/train_data_utils.py",
        ids=("tokens",),
        rollout="rollout_log_probs",
        trainer="log_probs",
        mask=("loss_mask", "loss_masks"),
        response_length="response_length",
        cached="cached_tokens",
    ),
    Schema(
        name="rpadiag",
        source="docs/rollouts.md",
        ids=("token_ids",),
        rollout="rollout_logprobs",
        trainer="trainer_logprobs",
        mask=("mask",),
        attention=("attention_mask",),
        positions="position_ids",
        rollout_ids="rollout_token_ids",
        step="step",
        version="version",
        temperature="temperature",
        cached="cached_tokens",
    ),
)
BY_NAME = {s.name: s for s in SCHEMAS}

# Dumps that hold text alone: (columns, what they are, what to save instead).
_TEXT_ONLY = (
    (("input", "output", "score"), "verl's rollout_data_dir", "verl"),
    (("prompt", "completion", "advantage"), "TRL's log_completions", "trl"),
    (("input_prompt", "output_response"), "SkyRL's dumped evaluations", "skyrl"),
)


def find_schema(columns: Collection[str], named: str | None, where: str) -> Schema:
    """The schema that ``named`` says, or the one whose columns are there. where: the file, for messages.

    Raises UsageError for an unknown name or a file that fits several, InputError for one that fits none.
    """
    if named is not None:
        if named not in BY_NAME:
            raise unknown_name("schema", named, BY_NAME)
        return _complete(BY_NAME[named], columns, where)
    fitting = [s for s in SCHEMAS if set(s.needed) <= set(columns)]
    if len(fitting) > 1:
        fitting = [s for s in fitting if s.trainer in columns] or fitting
    if len(fitting) > 1:
        names = ", ".join(s.name for s in fitting)
        raise UsageError(f"{where} fits several schemas: {names}", hint=f"say which with --schema {fitting[0].name}")
    if fitting:
        return fitting[0]
    raise _nothing_fits(columns, where)


def _complete(schema: Schema, columns: Collection[str], where: str) -> Schema:
    missing = [c for c in schema.needed if c not in columns]
    if missing:
        raise InputError(
            f"{where} lacks {', '.join(missing)} of schema {schema.name}",
            detail=f"its columns: {_listed(columns)}",
            hint=f"schema {schema.name} is {schema.source}",
        )
    return schema


def _nothing_fits(columns: Collection[str], where: str) -> InputError:
    for text_columns, what, name in _TEXT_ONLY:
        if set(text_columns) <= set(columns):
            return InputError(
                f"{where} has text but no token ids and no log-probabilities: it is {what}",
                detail="log-probabilities belong to token ids; text tokenised again need not give the same ones",
                hint=f"save {', '.join(BY_NAME[name].needed)} and {BY_NAME[name].trainer} as well; docs/rollouts.md has the lines",
            )
    wanted = "\n".join(f"{s.name}: {', '.join(s.needed)}" for s in SCHEMAS)
    return InputError(
        f"{where} is of no known schema",
        detail=f"its columns: {_listed(columns)}\nschemas and the columns they need:\n{wanted}",
        hint="rename the columns to those of schema rpadiag; docs/rollouts.md describes it",
    )


def _listed(columns: Collection[str]) -> str:
    names: Sequence[str] = [repr(c)[1:-1][:60] for c in columns]
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "") if names else "none"
