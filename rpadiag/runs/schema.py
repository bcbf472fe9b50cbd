"""Columns of the Parquet files of a run: name, type, unit and meaning, once.

The writer builds the files from this, readers check against it, and ``docs/run-format.md`` is printed
from it. A change here that is not an added nullable column raises FORMAT_VERSION.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rpadiag.errors import unknown_name

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_NAME = "rpadiag-run"
FORMAT_VERSION = 1
SOURCES = ("all", "prefill", "decode", "rescored")  # of the tokens that a set of logprob metrics is over
TYPES = ("int32", "int64", "float32", "float64", "bool", "string", "list<int32>", "list<int64>", "list<float64>")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column. type: one of TYPES. unit: what one count of it is. nullable: absent means not measured."""

    name: str
    type: str
    unit: str
    text: str
    nullable: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """One Parquet file, ``<name>.parquet``; ``key`` names the columns that identify a row."""

    name: str
    text: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def file(self) -> str:
        return f"{self.name}.parquet"

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)

    def arrow(self) -> pa.Schema:
        """The Arrow schema; unit and meaning travel in each field's metadata."""
        import pyarrow as pa

        plain = {"int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(), "float64": pa.float64()}
        types = {
            **plain,
            "bool": pa.bool_(),
            "string": pa.string(),
            "list<int32>": pa.list_(pa.int32()),
            "list<int64>": pa.list_(pa.int64()),
            "list<float64>": pa.list_(pa.float64()),
        }
        fields = [
            pa.field(c.name, types[c.type], nullable=c.nullable, metadata={"unit": c.unit, "text": c.text})
            for c in self.columns
        ]
        return pa.schema(fields, metadata={"rpadiag_table": self.name, "rpadiag_format": str(FORMAT_VERSION)})


def _i32(name: str, unit: str, text: str, *, nullable: bool = False) -> Column:
    return Column(name=name, type="int32", unit=unit, text=text, nullable=nullable)


def _i64(name: str, unit: str, text: str, *, nullable: bool = False) -> Column:
    return Column(name=name, type="int64", unit=unit, text=text, nullable=nullable)


def _f32(name: str, unit: str, text: str, *, nullable: bool = False) -> Column:
    return Column(name=name, type="float32", unit=unit, text=text, nullable=nullable)


def _f64(name: str, unit: str, text: str, *, nullable: bool = False) -> Column:
    return Column(name=name, type="float64", unit=unit, text=text, nullable=nullable)


def _str(name: str, unit: str, text: str, *, nullable: bool = False) -> Column:
    return Column(name=name, type="string", unit=unit, text=text, nullable=nullable)


ULP_COLUMNS: tuple[Column, ...] = (
    _i64("n", "elements", "elements compared", nullable=True),
    _i64("num_differing", "elements", "elements at least 1 ULP apart, or non-finite and not the same", nullable=True),
    _f64("differing", "share", "num_differing / n", nullable=True),
    _i64("max_ulp", "ULP", "largest distance of a finite pair; harmlessly large near zero", nullable=True),
    _f64("mean_signed_ulp", "ULP", "mean of rollout - trainer on the ordered line, each clipped to +-8", nullable=True),
    _f64(
        "mean_magnitude_ulp",
        "ULP",
        "mean of |rollout| - |trainer|, each clipped to +-8; sign flips left out; positive = rollout further from zero",
        nullable=True,
    ),
    _f64("sign_balance", "share", "(up - down) / (up + down) over differing finite pairs", nullable=True),
    _f64(
        "magnitude_balance",
        "share",
        "(away - toward) / (away + toward) over differing finite pairs without sign flips; -1 = rollout truncates",
        nullable=True,
    ),
    Column(
        name="ulp_hist",
        type="list<int64>",
        unit="elements",
        text="17 counts of finite pairs: bin 0 is 0 ULP, bin k is [2^(k-1), 2^k) ULP, bin 16 is open above",
        nullable=True,
    ),
    _f64("rel_l2", "ratio", "|rollout - trainer|_2 / |trainer|_2 over finite pairs", nullable=True),
    _f64("cosine", "ratio", "cosine of the two tensors over finite pairs", nullable=True),
    _i64("num_nonfinite_trainer", "elements", "NaN or infinity on the trainer side", nullable=True),
    _i64("num_nonfinite_rollout", "elements", "NaN or infinity on the rollout side", nullable=True),
    _i64(
        "num_nonfinite_mismatch", "elements", "pairs with a non-finite side that are not the same value", nullable=True
    ),
)


def _local(column: Column) -> Column:
    text = f"{column.text} (trainer op fed the rollout engine's input)"
    return replace(column, name=f"local_{column.name}", text=text, nullable=True)


PROMPTS = Table(
    name="prompts",
    text="One row per token sequence that was scored.",
    key=("prompt",),
    columns=(
        _i32("prompt", "index", "number of the prompt, from 0, as in the prompt file"),
        _i32("num_tokens", "tokens", "prompt and generated tokens"),
        _i32("num_prompt_tokens", "tokens", "tokens of the prompt alone"),
        _str(
            "text",
            "text",
            "the prompt as given, or as its chat template renders it; null where it was given as token ids",
            nullable=True,
        ),
        Column(name="token_ids", type="list<int32>", unit="token ids", text="prompt and generated tokens"),
        _str("token_digest", "hex", "BLAKE2b-128 of the token ids as little-endian int32"),
    ),
)

TOKENS = Table(
    name="tokens",
    text="One row per scored token: token t given the tokens before it, at the model's own precision.",
    key=("prompt", "position"),
    columns=(
        _i32("prompt", "index", "number of the prompt"),
        _i32("position", "index", "position t of the token in its sequence, from 1"),
        _i32("token", "token id", "the token that was scored"),
        _str("text", "text", "the decoded token; null without a tokenizer", nullable=True),
        _str("source", "name", "`prefill`: scored as part of a prompt; `decode`: scored when it was sampled"),
        _f32("p", "nats", "log-probability under the trainer", nullable=True),
        _f32("q", "nats", "log-probability under the rollout engine", nullable=True),
        _f32("p_entropy", "nats", "entropy of the trainer's distribution", nullable=True),
        _f32("q_entropy", "nats", "entropy of the rollout engine's distribution", nullable=True),
        _i32("p_rank", "rank", "rank of the token under the trainer, 1 = most likely", nullable=True),
        _i32("q_rank", "rank", "rank of the token under the rollout engine, 1 = most likely", nullable=True),
        _i32("p_argmax", "token id", "the trainer's most likely token", nullable=True),
        _i32("q_argmax", "token id", "the rollout engine's most likely token", nullable=True),
        _f32(
            "q_rescored",
            "nats",
            "log-probability under the rollout engine when the whole sequence is scored as a prompt; null unless it was sampled",
            nullable=True,
        ),
    ),
)

SITES = Table(
    name="sites",
    text="One row per site, prompt and source: how far the two stacks' tensors are apart.",
    key=("prompt", "precision", "source", "site", "pair"),
    columns=(
        _i32("prompt", "index", "number of the prompt"),
        _str("precision", "name", "`model`: the dtype under test; `fp32`: the control with both stacks in FP32"),
        _str("source", "name", "`prefill` or `decode`: how the rollout engine computed these tokens"),
        _i32("layer", "index", "decoder layer, from 0; null outside the layers", nullable=True),
        _str("site", "address", "the site, e.g. `layers.3.q_rope`"),
        _str("point", "name", "the site without its layer, e.g. `q_rope`"),
        _str("region", "name", "the region the site belongs to"),
        _str("pair", "name", "the two stacks, reference first: `trainer|rollout`"),
        *ULP_COLUMNS,
        *(_local(c) for c in ULP_COLUMNS),
        _f64("inherited_differing", "share", "differing share that the local one does not explain", nullable=True),
        _str("local_reason", "text", "why local divergence was not measured; null when it was", nullable=True),
        _i64(
            "expert_flips",
            "tokens",
            "of a router: tokens that the stacks send to different sets of experts; not part of any ULP column",
            nullable=True,
        ),
        _i64(
            "expert_ties",
            "tokens",
            "of a router: tokens whose last expert chosen and first one left out have equal logits on either stack",
            nullable=True,
        ),
        _i64(
            "local_expert_flips",
            "tokens",
            "expert_flips (trainer op fed the rollout engine's input)",
            nullable=True,
        ),
    ),
)


def _measured(name: str, unit: str, text: str) -> tuple[Column, Column]:
    """A nullable value and its standard error over sequences."""
    return (
        _f64(name, unit, text, nullable=True),
        _f64(f"{name}_se", unit, f"standard error of {name}, leaving out one sequence at a time", nullable=True),
    )


ATTRIBUTION = Table(
    name="attribution",
    text="One row per part (region, layer group or both), design and kind of noise of `rpadiag bisect`.",
    key=("region", "design", "kind"),
    columns=(
        _str(
            "region",
            "name",
            "the part: a region, `layers 0-4`, `rope layers 0-4`; `all` for every part, `self` for the control; `a × b` for an interaction; with design `rollout`, what is aligned: a part, `reference` (every part) or `all` (as it is: none)",
        ),
        _str(
            "design",
            "name",
            "`each`: only this part is not aligned; `only`: only this part is aligned; `all`: none is; `self`: the same forward under other noise; `main` and `interaction`: contrasts of a factorial design; `rollout`: a trainer against the replicated rollout engine instead",
        ),
        _str(
            "kind",
            "name",
            "noise of the replicates: `ulp` (embedding moved by -1, 0 or +1 ULP), `batch` (equivalent batches) or `order` (sums in another order)",
            nullable=True,
        ),
        *_measured(
            "systematic_sq",
            "nats^2",
            "mean squared systematic part of a token against the aligned trainer; unbiased, may be below 0",
        ),
        _f64("systematic_rms", "nats", "root of systematic_sq, 0 where that is negative", nullable=True),
        *_measured(
            "share",
            "share",
            "systematic_sq (of the main effect, where there is one) as a share of that of `all`; null where that is not above zero",
        ),
        *_measured(
            "mean_shift",
            "nats",
            "mean systematic change of a logprob; positive = this trainer finds the tokens more likely",
        ),
        _f64("chaotic_rms", "nats", "root mean square of what averaging over replicates removes", nullable=True),
        _f64("mean_abs_d", "nats", "mean |d| of single forwards; saturates, do not rank by it", nullable=True),
        _f64("k3_kl", "nats", "mean of exp(d) - 1 - d of single forwards", nullable=True),
        *_measured("k3_kl_systematic", "nats", "systematic part of k3_kl, systematic_sq / 2 (exact to second order)"),
        *_measured("k3_kl_chaotic", "nats", "k3_kl less its systematic part"),
        *_measured("weight_bias", "ratio", "mean over tokens and replicates of rho - 1, rho = exp(d)"),
        *_measured(
            "weight_bias_sq",
            "ratio^2",
            "unbiased mean square over tokens of E[rho - 1], the bias of the policy-gradient weight",
        ),
        *_measured("sequence_log_ratio_sq", "nats^2", "unbiased mean square over sequences of the systematic sum of d"),
        _f64(
            "sequence_log_ratio_chaotic_rms", "nats", "spread of a sequence's sum of d over replicates", nullable=True
        ),
        _f64(
            "p_value",
            "probability",
            "of no systematic effect, neither in systematic_sq nor in mean_shift (Student, sequences - 1 degrees of freedom)",
            nullable=True,
        ),
        _f64("p_adjusted", "probability", "p_value after Holm's correction over all parts", nullable=True),
        _str(
            "decision",
            "name",
            "`responsible`, `not distinguishable from zero`, `needs about N more replicates`, or `not ranked: a control failed`",
            nullable=True,
        ),
        _str(
            "end_to_end",
            "name",
            "what mean |d| could show: `saturated, only systematic effects shown`, `visible end to end` or `no effect at all`",
            nullable=True,
        ),
        _f64("upper_limit_sq", "nats^2", "one-sided 95 % confidence limit of systematic_sq", nullable=True),
        _i64(
            "more_replicates",
            "forwards",
            "replicates that would settle it, about; null where it is settled or they would not",
            nullable=True,
        ),
        *_measured(
            "naive_gain",
            "nats",
            "by how much mean |d| of one forward falls when this part alone is aligned; misleads, shown for comparison",
        ),
        _i64("naive_rank", "rank", "order by naive_gain, 1 = largest", nullable=True),
        _f64(
            "local_differing", "share", "elements moved when fed the same input, but for residual adds", nullable=True
        ),
        _f64(
            "local_predicted_sq",
            "nats^2",
            "mean squared first-order effect on a logprob that local evidence predicts",
            nullable=True,
        ),
        *_measured("local_slope", "ratio", "the part of the local prediction that the replicates see; 1 = they agree"),
        _i64("num_replicates", "forwards", "rounding replicates averaged"),
        _i64("num_tokens", "tokens", "tokens averaged"),
        _i64("num_sequences", "sequences", "sequences that the standard errors come from", nullable=True),
        Column(
            name="detectable",
            type="bool",
            unit="flag",
            text="above zero at the level of the run; for `each` the decision is `responsible`",
        ),
    ),
)

EFFECTS = Table(
    name="effects",
    text="One row per part and metric of `rpadiag bisect`: what aligning the part alone does to a metric of `rpadiag compare`.",
    key=("region", "metric"),
    columns=(
        _str("region", "name", "the part that is aligned; `all` aligns every part"),
        _str("metric", "name", "a metric of `metrics.json`, the aligned trainer standing for the rollout engine"),
        *_measured("as_is", "its own", "the metric with the trainer as it is"),
        *_measured("aligned", "its own", "the metric with this part aligned"),
        *_measured("change", "its own", "aligned - as_is, with the joint error"),
        _f64(
            "floor",
            "its own",
            "the metric of the fully aligned trainer against itself under other noise",
            nullable=True,
        ),
    ),
)

REPLICATES = Table(
    name="replicates",
    text="One row per forward of `rpadiag bisect`. A forward that two variants share is stored once, under the first.",
    key=("design", "region", "kind", "replicate"),
    columns=(
        _str(
            "design",
            "name",
            "design of the variant, as in attribution.parquet; also `reference` (every part aligned) and `factorial`",
        ),
        _str(
            "region",
            "name",
            "the part, as in attribution.parquet; `reference`; for `factorial` the parts not aligned, joined by `+`",
        ),
        _str("kind", "name", "`ulp`, `batch`, `order`, or `none` for the forward without noise"),
        _i32("replicate", "index", "number of the replicate, from 0"),
        _i64("seed", "seed", "seed of its noise"),
        Column(
            name="logprobs",
            type="list<float64>",
            unit="nats",
            text="of every scored token: prompts in order, positions from 1",
        ),
    ),
)

TABLES: dict[str, Table] = {t.name: t for t in (PROMPTS, TOKENS, SITES, ATTRIBUTION, EFFECTS, REPLICATES)}


def table_named(name: str) -> Table:
    """Table of a run by name; unknown names raise with the known ones."""
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    return TABLES[name]


def markdown_table(name: str | None = None) -> str:
    """The columns as Markdown: one table's rows, or every table under a heading of its file name."""
    if name is None:
        parts = [
            f"## {t.file}\n\n{t.text} Key: {', '.join(f'`{k}`' for k in t.key)}.\n\n{markdown_table(t.name)}"
            for t in TABLES.values()
        ]
        return "\n".join(parts)
    lines = ["| column | type | null | unit | meaning |", "|---|---|---|---|---|"]
    for c in table_named(name).columns:
        text = c.text.replace("|", "\\|")
        lines.append(f"| `{c.name}` | {c.type} | {'yes' if c.nullable else 'no'} | {c.unit} | {text} |")
    return "\n".join(lines) + "\n"
