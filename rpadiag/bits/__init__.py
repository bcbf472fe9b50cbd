"""Distances between floating-point numbers of one dtype, in units in the last place."""

from rpadiag.bits.stats import CLIP_ULP, NUM_BINS, UlpStats, to_numpy_bits, ulp_stats

__all__ = ["CLIP_ULP", "NUM_BINS", "UlpStats", "to_numpy_bits", "ulp_stats"]
