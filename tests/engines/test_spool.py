"""Rows that are held and written later are the rows that were captured."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rpadiag.engines import spool
from rpadiag.engines.base import TokenSequence
from rpadiag.engines.bundle import BundleCapture
from rpadiag.engines.bundle_writer import SequenceWriter, raw_name
from rpadiag.engines.spool import Spool
from rpadiag.errors import CaptureError

ROWS, WIDTH = 23, 96


def written(directory: Path, held: Spool, pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Capture pieces (row, rows) of one site through a spool, each overwritten as soon as it was taken; the site as read."""
    writer = SequenceWriter(directory / raw_name(0))
    for row, rows in pieces:
        passing = rows.clone()
        held.append(writer, "layers.0.q", passing, row=row)
        passing.zero_()
    held.flush()
    writer.close()
    sequence = TokenSequence(prompt=0, token_ids=(0,) * ROWS, num_prompt_tokens=ROWS)
    return BundleCapture(directory / raw_name(0), sequence).read("layers.0.q")


@pytest.mark.parametrize("limit", [0, 3 * WIDTH * 2, 10**9])
@pytest.mark.parametrize("buffer_bytes", [2 * WIDTH * 2, 7, 64 << 20])
def test_rows_come_back_as_they_were_captured(
    tmp_path: Path, limit: int, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "BUFFER_BYTES", buffer_bytes)
    whole = torch.randn(ROWS, WIDTH).bfloat16()
    cuts = [0, 16, 17, 18, 22, ROWS]
    pieces = [(a, whole[a:b]) for a, b in itertools.pairwise(cuts)]
    held = Spool(limit_bytes=limit, hold_cpu=True)
    assert torch.equal(written(tmp_path, held, pieces), whole)
    assert held.most_bytes <= limit


def test_pieces_out_of_order_find_their_rows(tmp_path: Path) -> None:
    whole = torch.randn(ROWS, WIDTH)
    pieces = [(9, whole[9:]), (0, whole[:5]), (5, whole[5:9])]
    assert torch.equal(written(tmp_path, Spool(limit_bytes=10**9, hold_cpu=True), pieces), whole)


def test_a_slice_of_a_fused_tensor_is_held_without_the_rest(tmp_path: Path) -> None:
    fused = torch.randn(ROWS, 3 * WIDTH).bfloat16()
    held = Spool(limit_bytes=10**9, hold_cpu=True)
    part = fused[:, WIDTH : 2 * WIDTH]
    assert torch.equal(written(tmp_path, held, [(0, part)]), part)
    assert held.most_bytes == ROWS * WIDTH * 2


def test_what_writing_raises_comes_out_of_the_flush(tmp_path: Path) -> None:
    writer = SequenceWriter(tmp_path / raw_name(0))
    held = Spool(limit_bytes=10**9, hold_cpu=True)
    held.append(writer, "layers.0.q", torch.zeros(2, WIDTH), row=0)
    held.append(writer, "layers.0.q", torch.zeros(2, 3), row=4)
    with pytest.raises(CaptureError, match="changed from float32 with width 96"):
        held.flush()
    writer.abandon()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_of_a_gpu_come_back_as_they_were_captured(tmp_path: Path) -> None:
    whole = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
    held = Spool.for_device(whole.device)
    assert held.limit_bytes > 0
    assert torch.equal(written(tmp_path, held, [(0, whole[:20]), (20, whole[20:])]), whole.cpu())
