"""ULP statistics against a definition written the slow way, and against values known by hand."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpadiag.bits import CLIP_ULP, NUM_BINS, UlpStats, to_numpy_bits, ulp_stats
from rpadiag.errors import UsageError
from rpadiag.runs.schema import ULP_COLUMNS

INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x80000000}
PATTERN = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


def value_of(pattern: int, dtype: str) -> float:
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<H", pattern))[0])
    return float(struct.unpack("<f", struct.pack("<I", pattern << 16 if dtype == "bfloat16" else pattern))[0])


def slow(a: list[int], b: list[int], dtype: str) -> dict[str, Any]:
    """The definition, one pair at a time with Python integers and exact fractions."""
    out: dict[str, Any] = dict.fromkeys(
        ("num_differing", "max_ulp", "sum_signed_clip8", "sum_magnitude_clip8", "num_up", "num_down", "num_away")
        + ("num_toward", "num_nonfinite_a", "num_nonfinite_b", "num_nonfinite_mismatch"),
        0,
    )
    hist = [0] * NUM_BINS
    sums = dict.fromkeys(("sum_sq_diff", "sum_sq_a", "sum_sq_b", "dot"), Fraction(0))
    for x, y in zip(a, b, strict=True):
        vx, vy = value_of(x, dtype), value_of(y, dtype)
        out["num_nonfinite_a"] += not math.isfinite(vx)
        out["num_nonfinite_b"] += not math.isfinite(vy)
        if not (math.isfinite(vx) and math.isfinite(vy)):
            same = vx == vy or (math.isnan(vx) and math.isnan(vy))
            out["num_nonfinite_mismatch"] += not same
            out["num_differing"] += not same
            continue
        line = [-(p & ~SIGN[dtype]) if p & SIGN[dtype] else p for p in (x, y)]
        d = line[1] - line[0]
        hist[min(abs(d).bit_length(), NUM_BINS - 1)] += 1
        out["max_ulp"] = max(out["max_ulp"], abs(d))
        out["num_differing"] += d != 0
        out["num_up"] += d > 0
        out["num_down"] += d < 0
        out["sum_signed_clip8"] += max(-CLIP_ULP, min(CLIP_ULP, d))
        if line[0] * line[1] >= 0:
            g = abs(line[1]) - abs(line[0])
            out["num_away"] += g > 0
            out["num_toward"] += g < 0
            out["sum_magnitude_clip8"] += max(-CLIP_ULP, min(CLIP_ULP, g))
        fx, fy = Fraction(vx), Fraction(vy)
        sums["sum_sq_diff"] += (fy - fx) ** 2
        sums["sum_sq_a"] += fx * fx
        sums["sum_sq_b"] += fy * fy
        sums["dot"] += fx * fy
    return {**out, "n": len(a), "hist": tuple(hist), **sums}


def assert_equals_definition(a: list[int], b: list[int], dtype: str) -> None:
    x, y = np.array(a, PATTERN[dtype]), np.array(b, PATTERN[dtype])
    if dtype == "float32":
        got = ulp_stats(x.view(np.float32), y.view(np.float32))
    else:
        got = ulp_stats(x, y, dtype=dtype)
    want = slow(a, b, dtype)
    for name in ("sum_sq_diff", "sum_sq_a", "sum_sq_b", "dot"):
        exact = float(want.pop(name))
        # float64 sums of n terms: n roundings relative to the sum of magnitudes, which for dot is |a||b| at most
        scale = float(math.sqrt(got.sum_sq_a * got.sum_sq_b)) if name == "dot" else exact
        assert abs(getattr(got, name) - exact) <= (len(a) + 4) * 2.0**-52 * scale
    for name, value in want.items():
        assert getattr(got, name) == value, name


@st.composite
def patterns(draw: st.DrawFn) -> tuple[list[int], list[int], str]:
    dtype = draw(st.sampled_from(sorted(INFINITY)))
    top = 2 * SIGN[dtype] - 1
    specials = [0, SIGN[dtype], 1, SIGN[dtype] + 1, INFINITY[dtype], INFINITY[dtype] - 1, INFINITY[dtype] + 1]
    specials += [s | SIGN[dtype] for s in specials]
    one = st.one_of(st.sampled_from(specials), st.integers(0, top))
    size = draw(st.integers(0, 40))
    a = draw(st.lists(one, min_size=size, max_size=size))
    moves = draw(st.lists(st.one_of(st.integers(-20, 20), one), min_size=size, max_size=size))
    return a, [(x + m) & top for x, m in zip(a, moves, strict=True)], dtype


@settings(deadline=None, max_examples=300)
@given(patterns())
def test_statistics_equal_their_definition_on_any_bit_patterns(case: tuple[list[int], list[int], str]) -> None:
    assert_equals_definition(*case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_statistics_equal_their_definition_on_every_16_bit_pattern(dtype: str) -> None:
    a = np.arange(1 << 16)
    b = np.random.default_rng(0).permutation(a)
    assert_equals_definition(a.tolist(), b.tolist(), dtype)


@pytest.mark.parametrize("n", [1, 7, 2047, 2048, 2049, 4096, 5000])
def test_statistics_do_not_depend_on_where_blocks_end(n: int) -> None:
    rng = np.random.default_rng(n)
    a = rng.integers(0, 1 << 16, n)
    b = (a + rng.integers(-3, 4, n)) & 0xFFFF
    assert_equals_definition(a.tolist(), b.tolist(), "bfloat16")
    a = rng.integers(0, 1 << 32, n)
    b = (a + rng.integers(-3, 4, n)) & 0xFFFFFFFF
    assert_equals_definition(a.tolist(), b.tolist(), "float32")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_next_representable_value_is_one_ulp_away(dtype: type) -> None:
    a = np.array([0.0, 1.0, -1.0, 65504.0 if dtype is np.float16 else 3e38, 1e-7, 2.0], dtype)
    b = np.nextafter(a, dtype(-np.inf))
    stats = ulp_stats(a, b)
    assert (stats.max_ulp, stats.hist[1], stats.num_down, stats.num_up) == (1, a.size, a.size, 0)


def test_the_two_zeros_are_0_apart_and_the_smallest_subnormals_around_them_2() -> None:
    zeros = np.array([0x0000, 0x8000], np.uint16)
    assert ulp_stats(zeros, zeros[::-1]).num_differing == 0
    stats = ulp_stats(np.array([0x8001], np.uint16), np.array([0x0001], np.uint16))
    assert (stats.max_ulp, stats.num_up, stats.num_away, stats.sum_magnitude_clip8) == (2, 1, 0, 0)


def test_from_zero_to_a_neighbour_is_away_whatever_the_sign_of_the_zero() -> None:
    stats = ulp_stats(np.array([0x0000, 0x8000, 0x8000], np.uint16), np.array([0x8001, 0x0001, 0x8001], np.uint16))
    assert (stats.num_away, stats.num_toward, stats.num_up, stats.num_down) == (3, 0, 1, 2)


def test_histogram_bins_start_at_powers_of_two() -> None:
    base = 0x0100
    distances = [0, 1, 2, 3, 4, 7, 8, 15, 16, 4095, 4096]
    stats = ulp_stats(np.full(len(distances), base, np.uint16), np.array([base + d for d in distances], np.uint16))
    assert stats.hist == (1, 1, 2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0)


def test_the_last_bin_is_open_above() -> None:
    stats = ulp_stats(np.array([-3e38], np.float32), np.array([3e38], np.float32))
    assert stats.hist[16] == 1
    assert stats.max_ulp == 2 * int(np.float32(3e38).view(np.uint32))


def test_truncation_shows_in_the_magnitude_balance_and_not_in_the_signed_mean() -> None:
    exact = np.random.default_rng(1).standard_normal(100_000).astype(np.float32).view(np.uint32)
    nearest = ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint16)
    truncated = (exact >> 16).astype(np.uint16)
    stats = ulp_stats(nearest, truncated)
    assert stats.magnitude_balance == -1.0
    assert stats.num_toward == stats.num_differing > 49_000
    assert stats.mean_magnitude_ulp == -stats.differing
    assert abs(stats.mean_signed_ulp) < 0.01  # hidden: as many up as down
    assert abs(stats.sign_balance) < 0.02


def test_means_clip_at_8_ulp_and_are_over_finite_pairs() -> None:
    a = np.array([0x4000, 0x4000, 0xC000, 0x7F80], np.uint16)
    b = np.array([0x4001, 0x4400, 0xC400, 0x7F80], np.uint16)
    stats = ulp_stats(a, b)
    assert stats.mean_signed_ulp == pytest.approx((1 + 8 - 8) / 3)
    assert stats.mean_magnitude_ulp == pytest.approx((1 + 8 + 8) / 3)


def test_sign_flips_are_left_out_of_the_magnitude_mean() -> None:
    stats = ulp_stats(np.array([1.0, 1.0], np.float32), np.array([-1.5, 1.0], np.float32))
    assert (stats.num_down, stats.num_away, stats.num_toward, stats.sum_magnitude_clip8) == (1, 0, 0, 0)
    assert stats.sum_signed_clip8 == -8


def test_nan_and_infinity_are_counted_and_never_averaged() -> None:
    inf, nan = math.inf, math.nan
    a = np.array([nan, nan, inf, inf, inf, 1.0, 2.0], np.float32)
    b = np.array([nan, 1.0, inf, -inf, nan, 1.0, -inf], np.float32)
    stats = ulp_stats(a, b)
    assert (stats.num_nonfinite_a, stats.num_nonfinite_b) == (5, 5)
    assert stats.num_nonfinite_mismatch == stats.num_differing == 4
    assert (stats.num_finite, stats.max_ulp, stats.sum_sq_a, stats.rel_l2) == (1, 0, 1.0, 0.0)


def test_nan_payloads_do_not_matter() -> None:
    stats = ulp_stats(np.array([0x7FC0, 0x7FC1], np.uint16), np.array([0xFFC0, 0x7FC0], np.uint16))
    assert (stats.num_differing, stats.num_nonfinite_a) == (0, 2)


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    rng = np.random.default_rng(2)
    a = rng.standard_normal(10_001).astype(np.float16)
    b = (a * rng.choice([1, 1.001, -1], a.size)).astype(np.float16)
    whole = ulp_stats(a, b)
    parts = sum((ulp_stats(a[i : i + 997], b[i : i + 997]) for i in range(0, a.size, 997)), UlpStats())
    for name in ("sum_sq_diff", "sum_sq_a", "sum_sq_b", "dot"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-11)
    exact = {f: getattr(whole, f) for f in ("n", "hist", "max_ulp", "num_up", "sum_signed_clip8", "num_toward")}
    assert {f: getattr(parts, f) for f in exact} == exact


def test_relative_l2_and_cosine_have_their_textbook_values() -> None:
    stats = ulp_stats(np.array([3.0, 0.0], np.float32), np.array([3.0, 4.0], np.float32))
    assert stats.rel_l2 == pytest.approx(4 / 3)
    assert stats.cosine == pytest.approx(3 / 5)


def test_all_zero_tensors_have_no_cosine_and_no_relative_error() -> None:
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert ulp_stats(zero, zero).rel_l2 == 0.0
    assert ulp_stats(zero, one).rel_l2 == math.inf
    assert math.isnan(ulp_stats(zero, one).cosine)


def test_empty_arrays_give_empty_statistics_without_ratios() -> None:
    stats = ulp_stats(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))
    assert stats == UlpStats()
    assert math.isnan(stats.differing) and math.isnan(stats.rel_l2)
    assert stats.columns()["differing"] is None


@pytest.mark.parametrize("view", ["transposed", "strided", "reversed", "broadcast", "scalar"])
def test_arrays_that_are_not_contiguous_give_the_same_statistics(view: str) -> None:
    rng = np.random.default_rng(3)
    a = rng.integers(0, 1 << 16, (64, 48)).astype(np.uint16)
    b = (a + rng.integers(0, 3, a.shape)).astype(np.uint16)
    take = {
        "transposed": lambda x: x.T,
        "strided": lambda x: x[::3, 5:40:2],
        "reversed": lambda x: x[:, ::-1],
        "broadcast": lambda x: np.broadcast_to(x[:1], (7, 48)),
        "scalar": lambda x: x[3, 3],
    }[view]
    x, y = np.asarray(take(a)), np.asarray(take(b))
    got, want = ulp_stats(x, y), ulp_stats(np.array(x, order="C", copy=True), np.array(y, order="C", copy=True))
    assert got.n == x.size
    assert (got.hist, got.num_up, got.num_nonfinite_a) == (want.hist, want.num_up, want.num_nonfinite_a)


def test_torch_tensors_are_read_in_place_and_equal_their_patterns() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a = torch.randn(33, 65, requires_grad=True).to(torch.bfloat16)
    bits = to_numpy_bits(a)
    assert bits.dtype == np.uint16 and bits.__array_interface__["data"][0] == a.data_ptr()
    b = (a.float() * 1.001).to(torch.bfloat16)
    assert ulp_stats(a, b) == ulp_stats(bits, to_numpy_bits(b))
    half, single = a.detach().half(), a.detach().float()
    assert to_numpy_bits(half).dtype == np.float16 and ulp_stats(half, half).num_differing == 0
    assert to_numpy_bits(single).dtype == np.float32 and ulp_stats(single.T, single.T).n == 33 * 65


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (np.zeros(2, np.float32), np.zeros(2, np.float16), "float32 and float16"),
        (np.zeros(2, np.float32), np.zeros(3, np.float32), r"\(2,\) and \(3,\)"),
        (np.zeros((2, 1), np.float32), np.zeros((1, 2), np.float32), "shape"),
        (np.zeros(2), np.zeros(2), "float64"),
        (np.zeros(2, np.int64), np.zeros(2, np.int64), "int64"),
        (np.zeros(2, ">f4"), np.zeros(2, ">f4"), "byte order"),
        ([1.0], [1.0], "list"),
    ],
)
def test_inputs_without_a_common_line_are_usage_errors(a: Any, b: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ulp_stats(a, b)


def test_a_dtype_name_that_contradicts_the_array_or_is_unknown_is_a_usage_error() -> None:
    x = np.zeros(2, np.uint16)
    with pytest.raises(UsageError, match="float32"):
        ulp_stats(x, x, dtype="float32")
    with pytest.raises(UsageError, match="unknown dtype: fp8"):
        ulp_stats(x, x, dtype="fp8")


def test_threads_do_not_disturb_one_another() -> None:
    rng = np.random.default_rng(4)
    a = rng.integers(0, 1 << 16, 200_000).astype(np.uint16)
    b = rng.integers(0, 1 << 16, 200_000).astype(np.uint16)
    want, got = ulp_stats(a, b), []
    threads = [threading.Thread(target=lambda: got.append(ulp_stats(a, b))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [want] * 4


def test_columns_are_those_of_the_run_schema() -> None:
    stats = ulp_stats(np.ones(3, np.float32), np.ones(3, np.float32))
    assert list(stats.columns()) == [c.name for c in ULP_COLUMNS]
    assert list(stats.columns("local_")) == [f"local_{c.name}" for c in ULP_COLUMNS]


def test_importing_bits_loads_neither_numba_nor_torch() -> None:
    code = "import sys, rpadiag.bits; print(sorted({'numba', 'torch', 'llvmlite'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_statistics_work_where_no_safe_cache_directory_exists(tmp_path: Any) -> None:
    shared = tmp_path / "rpadiag" / "numba"  # others may write to it: code from there must not be loaded
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    code = (
        "import os; import numpy as np; from rpadiag import bits; from rpadiag.bits import kernels; x = np.zeros(3, np.uint16);"
        "places = [kernels.cache_directory(), os.environ.update(XDG_CACHE_HOME='/proc/1/nowhere'), kernels.cache_directory()];"
        "print(places, bits.ulp_stats(x, x).n)"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.stdout.strip() == "[None, None, None] 3", done.stderr
    assert not any(tmp_path.rglob("*.nb*"))
