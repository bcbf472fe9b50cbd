"""docs/bundle-format.md does what it says: its writer makes bundles that compare, and it names what rpadiag reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import token_ids

from rpadiag.cli.app import run
from rpadiag.compare.causes import CONFIG
from rpadiag.engines.bundle import open_bundle
from rpadiag.engines.bundle_files import POSITIONS, SCORES
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.runs import open_run

TEXT = (Path(__file__).parents[2] / "docs" / "bundle-format.md").read_text(encoding="utf-8")


def example(name: str) -> dict[str, Any]:
    """What the documented block of that name defines."""
    found = re.search(rf"<!-- example: {name};.*?-->\n```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names


def forward(engine: TrainerEngine, ids: list[int]) -> tuple[dict[str, Any], Any]:
    """Every site of one forward, and its logprobs."""
    sites: dict[str, Any] = {}

    def keep(site: str, tensor: Any) -> None:
        sites[site] = tensor.clone()

    wanted = [s for s in engine.facts.sites if s != "logprob"]
    return sites, engine.forward(ids, sites=wanted, on_site=keep).logprob


@pytest.fixture(scope="module")
def captured(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(bundle of rpadiag capture, bundle of the documented writer fed by another program's forward of the same tokens)."""
    root = tmp_path_factory.mktemp("bundles")
    prompts = root / "p.jsonl"
    sequences = [token_ids(20, seed=seed) for seed in range(3)]
    prompts.write_text("".join(f'{{"token_ids": {ids}}}\n' for ids in sequences), encoding="utf-8")
    arguments = ["capture", str(tiny("llama")), str(prompts), "--engine", "trainer", "--bundle", str(root / "ours")]
    assert run(arguments) == 0

    engine = TrainerEngine.load(tiny("llama"))
    written = []
    for ids in sequences:
        sites, logprobs = forward(engine, ids)
        heads = sites["layers.1.q_rope"]
        sites["layers.1.q_rope"] = heads.view(len(ids), engine.facts.num_heads, engine.facts.head_dim)
        written.append({"token_ids": ids, "num_prompt_tokens": 20, "logprobs": logprobs, "sites": sites})
    digest = example("digest")["digest"]
    weights = {name: digest(p) for name, p in engine.model.named_parameters()}
    meta = {"engine": "another", "dtype": "bfloat16", "weights": {"tensors": weights}}
    example("writer")["write_bundle"](str(root / "theirs"), meta, written)
    return root / "ours", root / "theirs"


def test_the_documented_writer_is_read_like_our_own(captured: tuple[Path, Path], tmp_path: Path) -> None:
    ours, theirs = captured
    assert run(["compare", "--trainer", str(ours), "--rollout", str(theirs), "--run", str(tmp_path / "run")]) == 0
    found = open_run(tmp_path / "run")
    assert found.verdict is not None
    assert found.verdict["sentence"].startswith(
        "Identical: every captured site and all 57 logprobs agree to the last bit"
    )
    assert found.manifest["rollout_label"] == "another"
    assert found.manifest["weights"]["trainer"]["digest"] == found.manifest["weights"]["rollout"]["digest"]
    codes = [f["code"] for f in found.findings]
    assert "weights-unchecked" not in codes and "positions-unobserved" in codes


def test_one_bit_of_the_writers_tensors_is_found(captured: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    ours, theirs = captured
    broken = tmp_path / "broken"
    shutil.copytree(theirs, broken)
    path = broken / "sequence-00001.safetensors"
    tensors = load_file(path)
    tensors["layers.1.act"].view(torch.int16)[3, 7] ^= 1
    save_file(tensors, path)
    assert run(["compare", "--trainer", str(ours), "--rollout", str(broken), "--run", str(tmp_path / "run")]) == 2
    sites = open_run(tmp_path / "run").sites()
    (row,) = sites[sites["num_differing"] > 0].to_dict("records")
    assert (row["prompt"], row["site"], row["num_differing"], row["local_num_differing"]) == (1, "layers.1.act", 1, 1)


def test_a_bundle_without_digests_is_compared_with_a_warning(captured: tuple[Path, Path], tmp_path: Path) -> None:
    ours, _ = captured
    bundle = open_bundle(ours)
    sequences = [
        {
            "token_ids": s.token_ids,
            "num_prompt_tokens": 20,
            "logprobs": bundle.capture(i).column("scores.logprob"),
            "sites": {"embed": bundle.capture(i).read("embed")},
        }
        for i, s in enumerate(bundle.sequences)
    ]
    example("writer")["write_bundle"](str(tmp_path / "bare"), {}, sequences)
    pair = ["--trainer", str(ours), "--rollout", str(tmp_path / "bare")]
    assert run(["compare", *pair, "--run", str(tmp_path / "run")]) == 0
    found = open_run(tmp_path / "run")
    assert "weights-unchecked" in [f["code"] for f in found.findings]
    assert set(found.sites()["site"]) == {"embed", "logprob"}
    assert found.tokens()["q_entropy"].isna().all() and found.tokens()["p_entropy"].notna().all()


def test_every_key_and_every_configuration_entry_that_is_read_is_documented() -> None:
    for name in (
        POSITIONS,
        *(f"scores.{n}" for n in SCORES),
        *CONFIG,
        "quantization",
        "cache_dtype",
        "num_prompt_tokens",
    ):
        assert f"`{name}`" in TEXT, name


def test_every_point_of_a_plain_decoder_is_documented() -> None:
    from rpadiag.sites import all_sites

    for site in all_sites(1, qk_norm=True):
        point = site.rsplit(".", 1)[-1]
        assert f"`{point}`" in TEXT or point == "logprob", point
