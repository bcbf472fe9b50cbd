"""Rounding contracts of the timed implementations on this GPU, told from their outputs by rpadiag's fingerprint.

    PYTHONPATH=.:kernels python kernels/benchmarks/fingerprint_peers.py [--out fingerprints.json]

One line per region and implementation: the contract that reproduces every element, or what is known.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from peers import EPS, PEERS

from rpadiag.regions.fingerprint_rmsnorm import fingerprint_rmsnorm
from rpadiag.regions.fingerprint_rope import fingerprint_rope
from rpadiag.regions.fingerprint_swiglu import fingerprint_swiglu

TOKENS, HIDDEN = 256, 2048


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def fingerprint(region: str, function: Any) -> Any:
    """In-place implementations get clones; the inputs that the fingerprint sees are the originals."""
    if region == "rmsnorm":
        x, r, w = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN), randn(HIDDEN)
        given = x.clone()
        result = function(given, r.clone(), w)
        y = result[0] if isinstance(result, tuple) else given
        return fingerprint_rmsnorm(x.cpu(), w.cpu(), y.cpu(), eps=EPS, residual=r.cpu())
    if region == "swiglu":
        gate, up = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN)
        return fingerprint_swiglu(gate.cpu(), up.cpu(), function(gate.clone(), up.clone()).cpu())
    q, k = randn(1, TOKENS, 8, 128).transpose(1, 2), randn(1, TOKENS, 2, 128).transpose(1, 2)
    positions = torch.arange(1000, 1000 + TOKENS)
    inv_freq = 10000.0 ** (-torch.arange(64) / 64)
    angle = positions.float()[:, None] * inv_freq
    tables = [torch.cat((t, t), dim=-1)[None].bfloat16().cuda() for t in (angle.cos(), angle.sin())]
    given = q.clone()
    result = function(given, k.clone(), *tables)
    turned = result[0] if isinstance(result, tuple) else result
    as_rows = [t[0].transpose(0, 1).contiguous().cpu() for t in (q, turned)]
    return fingerprint_rope(
        as_rows[0],
        positions,
        as_rows[1],
        cos=tables[0][0, :, :64].float().cpu(),
        sin=tables[1][0, :, :64].float().cpu(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for region, peers in PEERS.items():
        for peer in peers:
            try:
                function = peer.load()
                with torch.no_grad():
                    found = fingerprint(region, function)
            except Exception as error:  # noqa: BLE001  one that fails must not hide the others
                print(f"{region:8s} {peer.name:22s} absent: {type(error).__name__}: {str(error)[:160]}", flush=True)
                continue
            print(f"{region:8s} {peer.name:22s} {found.text}", flush=True)
            rows.append({"region": region, "name": peer.name, **found.to_dict()})
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
