"""The sequences furthest apart: which are listed, what is packed of them, what is left out and said."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from unit.reports.written_runs import write_compare

from rpadiag.reports import sequences
from rpadiag.reports.reading import read_tokens
from rpadiag.reports.view import Block
from rpadiag.runs import open_run

TEXT = "</script><b>Prompt & text</b>\n" + "word " * 40


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Block:
    run = open_run(
        write_compare(tmp_path_factory.mktemp("runs") / "run", num_layers=1, num_prompts=43, prompt_text=TEXT)
    )
    _, scored = read_tokens(run)
    made = sequences.sequences_block(run, scored, "s0")
    assert made is not None
    return made


def packed(block: Block) -> dict[str, Any]:
    assert block.sequences is not None
    return dict(json.loads(gzip.decompress(base64.b64decode(block.sequences.packed))))


def frame(d: list[float], prompts: list[int]) -> pd.DataFrame:
    n = len(d)
    return pd.DataFrame(
        {"prompt": prompts, "position": range(1, n + 1), "token": range(n), "text": [None] * n, "source": ["prefill"] * n, "p": d, "q": [0.0] * n,
         "d": d, "p_argmax": [1] * n, "q_argmax": [1, 2] * (n // 2) + [1] * (n % 2)}
    )  # fmt: skip


def test_worst_sequences_are_listed_by_the_beginning_of_their_prompt(block: Block) -> None:
    assert block.sequences is not None
    rows = block.sequences.rows
    assert len(rows) == sequences.NUM_SEQUENCES == len(packed(block))
    means = [float(r.cells[0]) for r in rows]
    assert means == sorted(means, reverse=True)
    assert rows[0].share == 1.0
    named = {r.prompt: r.name for r in rows}
    assert named[0].startswith("</script><b>Prompt & text</b> word") and len(named[0]) <= sequences.NAME_WIDTH


def test_sequences_that_are_left_out_are_counted_with_a_bound(block: Block) -> None:
    assert block.sequences is not None
    assert block.sequences.left_out is not None
    assert block.sequences.left_out.startswith("3 sequences closer than these, mean |d| at most 0.0")


def test_packed_tokens_are_those_of_the_run_with_where_generation_begins(block: Block) -> None:
    first = packed(block)["0"]
    assert len(first["texts"]) == len(first["d"]) == 59
    assert first["positions"][0] == 1 and first["generated"] == 47
    assert first["texts"][29] == " strange" and first["d"][29] == pytest.approx(-0.61, abs=1e-3)
    assert first["before"] == first["after"] == 0


def test_means_of_a_sequence_are_over_its_own_tokens() -> None:
    found = sequences.by_sequence(frame([0.1, -0.3, 0.0, 0.4], [7, 7, 9, 9]))
    assert found["prompt"].tolist() == [7, 9] and found["n"].tolist() == [2, 2]
    assert found["mean"].tolist() == pytest.approx([0.2, 0.2]) and found["shift"].tolist() == pytest.approx([-0.1, 0.2])
    assert found["outside"].tolist() == [0.5, 0.5]


def test_long_sequence_is_cut_around_its_worst_token_and_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MAX_TOKENS", 10)
    d = np.zeros(100)
    d[60] = -2.0
    cut = sequences._tokens_of(frame(d.tolist(), [3] * 100))
    assert (cut["before"], cut["after"]) == (55, 35) and cut["d"][5] == -2.0
    assert cut["texts"][5] == "⟨60⟩" and cut["flips"] == [0, 2, 4, 6, 8]
    end = sequences._tokens_of(frame([*d[:99].tolist(), 3.0], [3] * 100))
    assert (end["before"], end["after"], len(end["d"])) == (90, 0, 10)


def test_name_of_a_prompt_is_one_line() -> None:
    assert sequences.short("a\n\n b") == "a b"
    assert sequences.short(None) == ""
    assert sequences.short("x" * 100, 10) == "xxxxxxxxx…"
