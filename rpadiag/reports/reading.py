"""What a page needs of a run's tables, and no more: a run of a million tokens is drawn in a few hundred megabytes.

Site rows come without their histograms and with names as categories; the histograms come summed by site. Tokens come as numbers; their
text is read for those that a page shows: the furthest apart with their context, the worst sequences, and the sample that is drawn as points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rpadiag.reports import pooling
from rpadiag.reports.blocks import NUM_WORST
from rpadiag.reports.figures_tokens import MAX_POINTS
from rpadiag.reports.sequences import NUM_SEQUENCES, by_sequence
from rpadiag.runs import Run

if TYPE_CHECKING:
    import pandas as pd

_MEASURED = ("n", "num_differing", "rel_l2", "max_ulp", "magnitude_balance")
SITE_NAMES = ("precision", "point", "region", "local_reason")
SITE_COLUMNS = (
    *SITE_NAMES, "layer", *_MEASURED, *(f"local_{c}" for c in _MEASURED), "num_nonfinite_trainer", "num_nonfinite_rollout",
)  # fmt: skip
NUM_BINS = 17
TOKEN_COLUMNS = ("prompt", "position", "token", "source", "p", "q", "p_rank", "q_rank", "p_argmax", "q_argmax")


def read_sites(run: Run) -> pd.DataFrame:
    """The site rows that pooling reads."""
    return run.frame("sites", SITE_COLUMNS, categories=SITE_NAMES)


def read_histograms(run: Run) -> dict[str, NDArray[np.int64]]:
    """Local ULP counts [17] in the model's dtype, summed over prompts, by site; sites that were not measured are absent."""
    import pyarrow.compute as pc

    table = run.table("sites", ["precision", "site", "local_ulp_hist"])
    table = table.filter(pc.and_(pc.equal(table["precision"], "model"), pc.is_valid(table["local_ulp_hist"])))
    if not table.num_rows:
        return {}
    names = table["site"].combine_chunks().dictionary_encode()
    flat = table["local_ulp_hist"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if len(flat) != NUM_BINS * table.num_rows:
        return {}
    counts = flat.reshape(-1, NUM_BINS)
    codes = names.indices.to_numpy(zero_copy_only=False)
    sums = np.zeros((len(names.dictionary), NUM_BINS), np.int64)
    for i in range(NUM_BINS):  # a column at a time: sums of counts stay exact below 2**53
        sums[:, i] = np.bincount(codes, weights=counts[:, i], minlength=len(sums)).astype(np.int64)
    return dict(zip(names.dictionary.to_pylist(), sums, strict=True))


def read_tokens(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(every token, the tokens that both stacks scored with ``d``); ``text`` is None but where a page shows it."""
    tokens = run.frame("tokens", TOKEN_COLUMNS, categories=("source",))
    tokens["text"] = None
    tokens["row"] = np.arange(len(tokens))
    scored = pooling.scored_tokens(tokens)
    if not len(scored):
        return tokens, scored
    prompts = np.union1d(
        pooling.largest(scored, NUM_WORST)["prompt"].unique(), by_sequence(scored).head(NUM_SEQUENCES)["prompt"]
    )
    in_context = np.flatnonzero(tokens["prompt"].isin(prompts).to_numpy())
    drawn = pooling.spread_sample(scored, MAX_POINTS)["row"].to_numpy()
    shown = np.union1d(in_context, drawn)
    words = run.table("tokens", ["text"]).column("text").take(shown).to_pylist()
    text = np.full(len(tokens), None, dtype=object)
    text[shown] = words
    tokens["text"] = text
    scored["text"] = text[scored["row"].to_numpy()]
    return tokens, scored
