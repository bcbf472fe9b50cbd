"""Bundles: what is written is what is read, and nothing half-written looks whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rpadiag.engines.base import TokenScores
from rpadiag.engines.bundle import BundleWriter, open_bundle
from rpadiag.errors import CaptureError, InputError, UsageError

IDS = [5, 6, 7, 8, 9, 10]


def rows(count: int, width: int, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write(directory: Path, **sites: torch.Tensor) -> Path:
    with BundleWriter(directory, {"engine": "test"}) as bundle:
        bundle.begin(0)
        for site, tensor in sites.items():
            bundle.append(site.replace("__", "."), tensor)
        bundle.end(0, token_ids=IDS, num_prompt_tokens=4)
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_site_is_read_back_to_the_bit_in_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = rows(6, 40, dtype=dtype)
    tensor[0, 0], tensor[1, 1] = torch.nan, -torch.inf
    read = open_bundle(write(tmp_path / "b", embed=tensor)).capture(0).read("embed")
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_strided_rows_and_heads_are_written_as_their_values(tmp_path: Path) -> None:
    fused = rows(6, 96)
    bundle = open_bundle(
        write(tmp_path / "b", layers__0__k=fused[:, 32:64], layers__0__q_norm=fused[:, :64].view(6, 2, 32))
    )
    assert torch.equal(bundle.capture(0).read("layers.0.k"), fused[:, 32:64])
    assert torch.equal(bundle.capture(0).read("layers.0.q_norm"), fused[:, :64])


def test_rows_of_chunks_and_decode_steps_come_back_in_token_order(tmp_path: Path) -> None:
    a, b = rows(6, 24, seed=1), rows(6, 10, seed=2, dtype=torch.float32)
    with BundleWriter(tmp_path / "b", {}) as bundle:
        bundle.begin(0)
        bundle.append("embed", a[:3])
        bundle.append("logits", b[3:4], row=3)  # the sampling row comes before the prompt's rows
        bundle.append("logits", b[:3], row=0)
        for t in range(3, 6):
            bundle.append("embed", a[t : t + 1])
        bundle.append("logits", b[4:], row=4)
        bundle.end(0, token_ids=IDS, num_prompt_tokens=4)
    capture = open_bundle(tmp_path / "b").capture(0)
    assert capture.sites == ("embed", "logits")
    assert torch.equal(capture.read("embed"), a)
    assert torch.equal(capture.read("logits"), b)


def test_sequences_may_be_written_in_turns(tmp_path: Path) -> None:
    tensors = [rows(6, 8, seed=s) for s in range(3)]
    with BundleWriter(tmp_path / "b", {}) as bundle:
        writers = [bundle.begin(i) for i in range(3)]
        for start in (0, 2, 4):
            for writer, tensor in zip(writers, tensors, strict=True):
                writer.append("embed", tensor[start : start + 2])
        for i in (2, 0, 1):
            bundle.end(i, token_ids=IDS, num_prompt_tokens=6, prompt=10 + i)
    read = open_bundle(tmp_path / "b")
    assert [s.prompt for s in read.sequences] == [10, 11, 12]
    for i, tensor in enumerate(tensors):
        assert torch.equal(read.capture(i).read("embed"), tensor)


def test_scores_positions_and_tokens_are_kept_exactly(tmp_path: Path) -> None:
    scores = TokenScores(
        logprob=np.array([-0.1, -np.inf, np.nan, -3.4028235e38, -1e-45], np.float32),
        entropy=np.linspace(0, 11, 5, dtype=np.float32),
        rank=np.array([1, 2, 3, 49152, 7], np.int32),
        argmax=np.array([5, 4, 3, 2, 1], np.int32),
    )
    with BundleWriter(tmp_path / "b", {"dtype": "bfloat16"}) as bundle:
        bundle.begin(0)
        bundle.end(0, token_ids=IDS, num_prompt_tokens=4, positions=np.arange(3, 9), scores=scores)
    read = open_bundle(tmp_path / "b")
    assert read.meta == {"dtype": "bfloat16"}
    assert read.sequences[0].token_ids == tuple(IDS) and read.sequences[0].num_prompt_tokens == 4
    capture = read.capture(0)
    assert capture.sites == ()
    assert capture.positions is not None and capture.positions.tolist() == list(range(3, 9))
    assert capture.scores is not None
    for name in ("logprob", "entropy", "rank", "argmax"):
        assert getattr(capture.scores, name).tobytes() == getattr(scores, name).tobytes()


def test_writing_to_a_read_tensor_leaves_the_bundle_as_it_is(tmp_path: Path) -> None:
    tensor = rows(6, 40)
    capture = open_bundle(write(tmp_path / "b", embed=tensor)).capture(0)
    capture.read("embed").zero_()
    assert torch.equal(capture.read("embed"), tensor)


def test_sites_are_listed_in_execution_order(tmp_path: Path) -> None:
    names = ("logits", "layers__10__q", "layers__2__down", "layers__2__q_norm", "embed", "layers__2__q")
    capture = open_bundle(write(tmp_path / "b", **{n: rows(6, 4) for n in names})).capture(0)
    expected = ("embed", "layers.2.q", "layers.2.q_norm", "layers.2.down", "layers.10.q", "logits")
    assert capture.sites == expected


def test_a_foreign_safetensors_bundle_is_read_like_our_own(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    embed, q = rows(6, 8), rows(6, 8, seed=3)
    save_file(
        {"embed": embed, "layers.0.q": q.view(6, 2, 4).contiguous(), "positions": torch.arange(6)},
        tmp_path / "sequence-00000.safetensors",
    )
    entry = {"file": "sequence-00000.safetensors", "token_ids": IDS, "num_prompt_tokens": 6}
    content = {"format": "rpadiag-bundle", "version": 1, "status": "complete", "sequences": [entry]}
    (tmp_path / "bundle.json").write_text(json.dumps(content))
    capture = open_bundle(tmp_path).capture(0)
    assert capture.sites == ("embed", "layers.0.q")
    assert torch.equal(capture.read("embed"), embed) and torch.equal(capture.read("layers.0.q"), q)
    assert capture.positions is not None and capture.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert capture.scores is None


def test_a_foreign_bundle_with_an_unknown_site_lists_the_known_ones(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"layers.0.attention": rows(6, 8)}, tmp_path / "sequence-00000.safetensors")
    content = {"format": "rpadiag-bundle", "version": 1, "status": "complete", "sequences": [{"token_ids": IDS}]}
    (tmp_path / "bundle.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"unknown site: layers\.0\.attention") as caught:
        open_bundle(tmp_path).capture(0)
    assert "layers.N.q_rope" in str(caught.value)


def test_a_site_that_was_not_captured_is_an_error(tmp_path: Path) -> None:
    capture = open_bundle(write(tmp_path / "b", embed=rows(6, 4))).capture(0)
    with pytest.raises(CaptureError, match=r"layers\.0\.q is not in"):
        capture.read("layers.0.q")


def test_a_site_with_a_missing_chunk_is_an_error(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b", {}) as bundle:
        bundle.begin(0)
        bundle.append("embed", rows(2, 4), row=0)
        bundle.append("embed", rows(2, 4), row=4)
        bundle.append("final_norm", rows(5, 4))
        bundle.end(0, token_ids=IDS, num_prompt_tokens=6)
    capture = open_bundle(tmp_path / "b").capture(0)
    with pytest.raises(InputError, match="missing rows: 4 of 6"):
        capture.read("embed")
    with pytest.raises(InputError, match="has 5 rows, expected 6"):
        capture.read("final_norm")


def test_a_site_that_changes_width_is_an_error(tmp_path: Path) -> None:
    bundle = BundleWriter(tmp_path / "b", {})
    bundle.begin(0)
    bundle.append("embed", rows(2, 4))
    with pytest.raises(CaptureError, match="width 4 to bfloat16 with width 5"):
        bundle.append("embed", rows(2, 5))
    bundle.abandon()


@pytest.mark.parametrize("stage", ["begun", "raised"])
def test_a_bundle_that_was_not_finished_says_so(tmp_path: Path, stage: str) -> None:
    bundle = BundleWriter(tmp_path / "b", {})
    bundle.begin(0)
    bundle.append("embed", rows(6, 4))
    if stage == "raised":
        with pytest.raises(ZeroDivisionError), bundle:
            _ = 1 / 0
    else:
        with pytest.raises(CaptureError, match="begun but never ended"):
            bundle.close()
    with pytest.raises(InputError, match="not complete: its status is writing"):
        open_bundle(tmp_path / "b")


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "b", embed=rows(6, 40)) / "sequence-00000.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="truncated: 479 bytes, its index names 480"):
        open_bundle(tmp_path / "b").capture(0)


def test_what_is_not_a_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no bundle\.json"):
        open_bundle(tmp_path / "nothing")
    for text, message in (
        ("{", "cannot read"),
        ("[]", "is not a bundle"),
        ('{"format": "rpadiag-bundle", "version": 9, "sequences": []}', "format version 9"),
        ('{"format": "rpadiag-bundle", "version": 1, "status": "complete", "sequences": [{}]}', "malformed"),
    ):
        (tmp_path / "bundle.json").write_text(text)
        with pytest.raises(InputError, match=message):
            open_bundle(tmp_path)


def test_an_existing_bundle_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "b", embed=rows(6, 4))
    with pytest.raises(InputError, match="already exists"):
        BundleWriter(tmp_path / "b", {})


def test_a_full_disk_is_named_and_leaves_no_complete_bundle(tmp_path: Path) -> None:
    bundle = BundleWriter(tmp_path / "b", {})
    (tmp_path / "b" / "sequence-00000.bin").symlink_to("/dev/full")
    bundle.begin(0)
    with pytest.raises(InputError, match="No space left on device") as caught:
        bundle.append("embed", rows(6, 1 << 18))
    bundle.abandon()
    assert caught.value.hint is not None and "free space" in caught.value.hint
    with pytest.raises(InputError, match="status is writing"):
        open_bundle(tmp_path / "b")


def test_reading_site_by_site_holds_one_site_in_memory(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b", {}) as bundle:
        bundle.begin(0)
        for layer in range(16):
            bundle.append(f"layers.{layer}.q", torch.full((6, 1 << 20), layer, dtype=torch.float32))
        bundle.end(0, token_ids=IDS, num_prompt_tokens=6)
    # 16 sites of 24 MiB each; the bound leaves room for two of them and the allocator
    code = (
        "import resource, sys, torch\nfrom rpadiag.engines.bundle import open_bundle\n"
        "c = open_bundle(sys.argv[1]).capture(0)\nc.read(c.sites[0]).sum()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert [float(c.read(s)[0, 0]) for s in c.sites] == list(range(16))\n"
        "for s in c.sites: c.read(s).sum()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "b"], capture_output=True, text=True, check=True)
    assert int(run.stdout) * 1024 < 64 << 20
