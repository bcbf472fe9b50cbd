"""Curves and a table of a sweep: one SVG for light and dark pages, and Markdown.

    python examples/rl/figure.py runs/rl/steps.parquet --svg runs/rl/curves.svg > runs/rl/table.md

A thin line is one seed, a thick one the median over seeds, both over SMOOTH rounds; a disc is where a run collapsed (collapse.py).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arms import ARMS, BASELINE, CONTROLS
from collapse import SMOOTH, Collapse, collapse
from table import read_table

Row = dict[str, Any]
Runs = dict[tuple[str, str, int], list[Row]]  # (setting, arm, seed) -> rounds in order; see setting_of
KNOWN = (*ARMS, *CONTROLS)

# Okabe and Ito's colours, told apart by colour-blind readers; black is the page's own colour.
COLOURS = {
    "bf16": "currentColor", "rope": "#e69f00", "fp32-output": "#0072b2", "engine": "#56b4e9", "fp32": "#009e73", "fp16": "#cc79a7",
    "tis": "#d55e00", "fp8-cache": "#8c8c8c", "fp32-both": "#8c8c8c",
}  # fmt: skip
PANELS = (
    ("reward", "reward", False), ("k3_kl", "k3 KL, nats", True), ("systematic_sq", "systematic part, nats²", True),
    ("grad_norm", "gradient norm", True),
)  # fmt: skip
SPARSE = ("systematic_sq",)  # measured every parts_every rounds, drawn as it is
WIDTH, HEIGHT, LEFT, TOP, GAP = 200, 120, 48, 58, 18
COST = ("seconds_generate", "seconds_sync", "seconds_train")
ALWAYS = ("model", "engine", "learning_rate", "arm", "seed", "round", "reward", *COST)  # no row is without these


def setting_of(row: Row) -> str:
    """What the arms of a comparison share: model, vLLM's mode, learning rate."""
    return f"{row['model']}, {row['engine']}, {row['learning_rate']:.0e}".replace("e-0", "e-")


def runs_of(rows: Sequence[Row]) -> Runs:
    runs: Runs = {}
    for row in sorted(rows, key=lambda r: r["round"]):
        runs.setdefault((setting_of(row), row["arm"], row["seed"]), []).append(row)
    return runs


def collapse_of(rounds: Sequence[Row]) -> Collapse:
    finite = [r["grad_norm"] is not None and r["loss"] is not None and math.isfinite(r["loss"]) for r in rounds]
    return collapse([r["reward"] for r in rounds], finite)


def cost_ratio(runs: Runs, setting: str, arm: str) -> tuple[float, float, float] | None:
    """Median and quartiles, over rounds of the same seed and number, of seconds against the baseline's; the round that starts engines is left out.

    Only within a file: runs of another sweep had other company on the device.
    """
    ratios = []
    for (m, a, seed), rounds in runs.items():
        base = runs.get((setting, BASELINE, seed))
        if (m, a) == (setting, arm) and base is not None and base[0].get("file") == rounds[0].get("file"):
            known = {r["round"]: sum(r[c] for c in COST) for r in base}
            ratios += [
                sum(r[c] for c in COST) / known[r["round"]]
                for r in rounds
                if known.get(r["round"], 0.0) > 0 and r["round"] > 0
            ]
    if len(ratios) < 2:
        return None
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def markdown(runs: Runs) -> str:
    """One row a setting and arm: what the seeds came to."""
    lines = [
        f"| model, engine, learning rate | arm | seeds | rounds | reward, last {SMOOTH} | best | collapsed | k3 KL, median | ESS, lowest | systematic, nats², mean | chaotic, nats², median | cost of a round |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for setting in dict.fromkeys(s for s, _, _ in runs):
        for arm in (a for a in KNOWN if any((s, b) == (setting, a) for s, b, _ in runs)):
            lines.append(_line(runs, setting, arm))
    return "\n".join(lines) + "\n"


def _line(runs: Runs, setting: str, arm: str) -> str:
    mine = {seed: rounds for (s, a, seed), rounds in runs.items() if (s, a) == (setting, arm)}
    found = {s: collapse_of(r) for s, r in mine.items()}
    every = [r for rounds in mine.values() for r in rounds]
    gone = {s: c for s, c in found.items() if c.round is not None}
    at = f" (round {', '.join(str(c.round) for c in gone.values())})" if gone else ""
    last = [statistics.fmean(r["reward"] for r in rounds[-SMOOTH:]) for rounds in mine.values()]
    best = [c.best for c in found.values() if math.isfinite(c.best)]
    ess = [r["ess"] for r in every if r["ess"] is not None and math.isfinite(r["ess"])]
    ratio = cost_ratio(runs, setting, arm)
    cells = [
        setting, arm, str(len(mine)), _range([len(r) for r in mine.values()]), _spread(last), _spread(best), f"{len(gone)} of {len(mine)}{at}",
        _median(every, "k3_kl"), f"{min(ess):.3f}" if ess else "",
        _mean(every, "systematic_sq"), _median(every, "chaotic_sq"),
        "" if ratio is None else "1" if arm == BASELINE else f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _median(rows: Sequence[Row], column: str) -> str:
    values = [r[column] for r in rows if r[column] is not None and math.isfinite(r[column])]
    return f"{statistics.median(values):.1e}" if values else ""


def _mean(rows: Sequence[Row], column: str) -> str:
    """With the standard error of the measurements' spread: an unbiased estimate may be negative, and its mean is what counts."""
    values = [r[column] for r in rows if r[column] is not None and math.isfinite(r[column])]
    if len(values) < 2:
        return f"{values[0]:.1e}" if values else ""
    return f"{statistics.fmean(values):.1e} ± {statistics.stdev(values) / math.sqrt(len(values)):.1e}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    text = f"{statistics.fmean(values):.2f}"
    return text if len(values) == 1 else f"{text} ({min(values):.2f} to {max(values):.2f})"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


# -- the picture ------------------------------------------------------------------------------------------------


class Axes:
    """One panel: data to pixels. log: the vertical axis."""

    def __init__(self, left: float, top: float, num_rounds: int, low: float, high: float, *, log: bool) -> None:
        self.left, self.top, self.num_rounds, self.log = left, top, max(2, num_rounds), log
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)

    def x(self, number: float) -> float:
        return self.left + WIDTH * number / (self.num_rounds - 1)

    def y(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        return self.top + HEIGHT * (1 - (place - self.low) / (self.high - self.low))

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float, opacity: float) -> str:
        shown = [(x, v) for x, v in points if math.isfinite(v) and not (self.log and v <= 0)]
        path = " ".join(f"{self.x(x):.1f},{self.y(v):.1f}" for x, v in shown)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}" stroke-linejoin="round"/>'

    def frame(self, title: str) -> list[str]:
        out = []
        for value, text in self._ticks():
            y = self.y(value)
            out.append(f'<line x1="{self.left}" x2="{self.left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            out.append(f'<text x="{self.left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
        for share in (0.0, 0.5, 1.0):
            number = round(share * (self.num_rounds - 1))
            out.append(
                f'<text x="{self.x(number):.1f}" y="{self.top + HEIGHT + 14}" text-anchor="middle">{number}</text>'
            )
        if title:
            out.append(
                f'<text x="{self.left + WIDTH / 2}" y="{self.top - 8}" text-anchor="middle" class="title">{title}</text>'
            )
        return out

    def _ticks(self) -> list[tuple[float, str]]:
        if self.log:
            step = max(1, math.ceil((self.high - self.low) / 4))
            return [(10.0**e, f"1e{e}") for e in range(math.ceil(self.low), math.floor(self.high) + 1, step)]
        return [
            (self.low + (self.high - self.low) * i / 4, f"{self.low + (self.high - self.low) * i / 4:.2g}")
            for i in range(5)
        ]


def curves(rounds: Sequence[Row], column: str) -> list[tuple[float, float]]:
    """(round, mean over the last SMOOTH rounds or those that there are), no point where one of them has no finite value; SPARSE columns as they are."""
    values = [math.nan if r[column] is None else float(r[column]) for r in rounds]
    width = 1 if column in SPARSE else SMOOTH
    means = [statistics.fmean(values[max(0, n - width + 1) : n + 1]) for n in range(len(values))]
    return [(r["round"], mean) for r, mean in zip(rounds, means, strict=True) if math.isfinite(mean)]


def median_of(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Median over seeds where all of them have a value."""
    tables = [dict(line) for line in lines]
    shared = sorted(set.intersection(*(set(t) for t in tables))) if tables else []
    return [(x, statistics.median(t[x] for t in tables)) for x in shared]


def svg(runs: Runs) -> str:
    """A row a setting, a column a panel."""
    settings = list(dict.fromkeys(s for s, _, _ in runs))
    arms = [a for a in KNOWN if any(b == a for _, b, _ in runs)]
    steps = [40 + 7 * len(arm) for arm in arms]  # of the legend
    across, down = WIDTH + GAP + LEFT, HEIGHT + GAP + 28
    width = max(len(PANELS) * across + 4, LEFT + sum(steps))
    height = TOP + len(settings) * down
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        "<title>Reward, mismatch and gradient norm of each arm over the rounds of training</title>",
        "<style>svg{color:#1f2328;background:#fff}text{font:11px system-ui,sans-serif;fill:currentColor}.title{font-weight:600;font-size:12px}"
        ".grid{stroke:currentColor;stroke-opacity:.15}@media(prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}</style>",
    ]
    x = float(LEFT)
    for arm, step in zip(arms, steps, strict=True):
        out.append(f'<line x1="{x}" x2="{x + 18}" y1="16" y2="16" stroke="{COLOURS[arm]}" stroke-width="2.5"/>')
        out.append(f'<text x="{x + 23}" y="20">{arm}</text>')
        x += step
    for j, setting in enumerate(settings):
        mine = {k: r for k, r in runs.items() if k[0] == setting}
        for i, (column, label, log) in enumerate(PANELS):
            title = f"{setting}: {label}" if i == 0 else label
            out += _panel(mine, column, LEFT + i * across, TOP + j * down, log=log, title=title)
    out.append(f'<text x="{LEFT + WIDTH / 2}" y="{height - 14}" text-anchor="middle">round</text></svg>')
    return "\n".join(out) + "\n"


def _panel(mine: Runs, column: str, left: float, top: float, *, log: bool, title: str) -> list[str]:
    lines = {key: curves(rounds, column) for key, rounds in mine.items()}
    values = [v for line in lines.values() for _, v in line if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(values, default=0.1), max(values, default=1.0)) if log else (0.0, 1.0)
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)
    axes = Axes(left, top, max(r[-1]["round"] for r in mine.values()) + 1, low, high, log=log)
    out = axes.frame(title)
    for arm in (a for a in KNOWN if any(k[1] == a for k in lines)):
        seeds = {k: line for k, line in lines.items() if k[1] == arm}
        if len(seeds) > 1:
            out += [axes.line(line, COLOURS[arm], 0.8, 0.45) for line in seeds.values()]
        out.append(axes.line(median_of(list(seeds.values())), COLOURS[arm], 2.0, 1.0))
        for key, line in seeds.items():
            found = collapse_of(mine[key])
            at = dict(line).get(found.round) if column == "reward" and found.round is not None else None
            if at is not None and math.isfinite(at):
                out.append(
                    f'<circle cx="{axes.x(found.round or 0):.1f}" cy="{axes.y(at):.1f}" r="4" fill="{COLOURS[arm]}"/>'
                )
    return out


def read_runs(paths: Sequence[Path]) -> Runs:
    """Runs of all files; a later file's replace an earlier's, which is said. Raises SystemExit for a file that has none, or broken ones."""
    runs: Runs = {}
    for path in paths:
        try:
            rows, _ = read_table(path)
        except ValueError as error:
            raise SystemExit(f"error: {error}\nhint: give steps.parquet of sweep.py or train.py") from None
        if not rows:
            raise SystemExit(f"error: {path} holds no round\nhint: its runs came to none; see the log beside each run")
        _check_rows(rows, path)
        found = runs_of([{**row, "file": str(path)} for row in rows])
        if again := len(set(runs) & set(found)):
            print(f"{path} replaces {again} runs of files before it", file=sys.stderr)
        runs |= found
    return runs


def _check_rows(rows: Sequence[Row], path: Path) -> None:
    for column in ALWAYS:
        if any(row[column] is None for row in rows):
            raise SystemExit(
                f"error: {path} has rows without {column}\nhint: give a table that sweep.py or train.py wrote"
            )
    unknown = sorted({row["arm"] for row in rows} - set(KNOWN))
    if unknown:
        raise SystemExit(f"error: {path} has an unknown arm {unknown[0]!r}\nhint: known are {', '.join(KNOWN)}")
    for (setting, arm, seed), rounds in runs_of(rows).items():
        if len({r["round"] for r in rounds}) < len(rounds):
            raise SystemExit(
                f"error: {path} has a round of {setting}, {arm}, seed {seed} twice\nhint: give tables whose runs differ in model, engine, learning rate, arm or seed"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps", type=Path, nargs="+", help="steps.parquet of sweeps; later files replace runs of earlier ones"
    )
    parser.add_argument("--svg", type=Path, help="write the curves here")
    given = parser.parse_args()
    if given.svg is not None and not given.svg.parent.is_dir():
        raise SystemExit(f"error: there is no directory {given.svg.parent} for the figure\nhint: make it first")
    runs = read_runs(given.steps)
    if given.svg is not None:
        given.svg.write_text(svg(runs), encoding="utf-8")
    print(markdown(runs), end="")


if __name__ == "__main__":
    main()
