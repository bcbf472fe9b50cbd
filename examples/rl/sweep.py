"""Many runs at once on one device, within a time limit; called again, it goes on where it stopped.

    python examples/rl/sweep.py --models qwen3-s --arms bf16,fp32-output --seeds 0,1 --preset harsh --processes 8 --seconds 570 --out runs/rl
    python examples/rl/sweep.py ... --list          # the plan, and what is done of it

Makes missing checkpoints first. Each run is a process of its own with a log of its own, and one that fails does not stop the others. Runs are
started seed by seed, so that all arms of a seed run side by side. At the end every run's rounds are in OUT/steps.parquet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arguments import check_contract, check_limits, check_seed
from arms import ARMS, CONTROLS, ENGINE, arm_of, contract_for
from directory import Spec, check_identity, is_taken, read_json, rows_at
from engine import MODES
from models import NAMES, RECIPES, recipe_of
from regime import regime_of
from table import write_table

HERE = Path(__file__).parent
START_S = 45.0  # from the start of a process to its first round, where nothing was measured yet
ROUND_S = 5.0  # on an H200, beside others
MARGIN_S = 30.0  # a run stops itself this long before the limit, for its last round, checkpoint and table
GRACE_S = 20.0  # after the limit, before a process is ended
# the last line of a traceback, as torch marks it
RAISED = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b(?:: .*)?)$")


@dataclass(kw_only=True)
class Run:
    """One planned run and, while it runs, its process."""

    model: str
    arm: str
    seed: int
    out: Path
    process: subprocess.Popen[bytes] | None = None
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.arm}-s{self.seed}"

    @property
    def directory(self) -> Path:
        return self.out / self.name

    def status(self) -> dict[str, Any]:
        path = self.directory / "status.json"
        found = read_json(path) if path.exists() else {"status": "planned", "rounds": 0}
        if found["status"] == "started" and self.process is None and not is_taken(self.directory):
            found["status"] = "interrupted"
        return found | self.said


def plan(models: Sequence[str], arms: Sequence[str], seeds: Sequence[int], out: Path) -> list[Run]:
    """Seed by seed, model by model, all arms."""
    return [Run(model=m, arm=a, seed=s, out=out) for s, m, a in itertools.product(seeds, models, arms)]


def estimate_s(runs: Sequence[Run], rounds: int, processes: int) -> float:
    """Seconds that what is left will take: as fast as these runs were, or as the constants say where none has run."""
    need = []
    for run in runs:
        done = run.status()["rounds"]
        if done < rounds:
            need.append(START_S + (rounds - done) * _seconds_a_round(run))
    return sum(need) / max(1, min(processes, len(need))) if need else 0.0


def _seconds_a_round(run: Run) -> float:
    path = run.directory / "steps.parquet"
    if not path.exists():
        return ROUND_S
    rows, _ = rows_at(path)
    parts = ("seconds_generate", "seconds_sync", "seconds_train", "seconds_measure")
    return sum(row[p] for row in rows for p in parts) / len(rows) if rows else ROUND_S


class Sweep:
    """arguments: of train.py, the same for all runs."""

    def __init__(self, runs: Sequence[Run], *, processes: int, deadline: float, arguments: Sequence[str]) -> None:
        self.runs, self.processes, self.deadline = list(runs), processes, deadline
        self.arguments = list(arguments)

    def work(self) -> None:
        """Start and watch until all runs are done or the time is over."""
        waiting = [r for r in self.runs if r.status()["status"] != "complete"]
        waiting.sort(
            key=lambda r: r.status()["rounds"]
        )  # the least advanced first; stable, so arms of a seed stay together
        running: list[Run] = []
        try:
            while waiting or running:
                running = [r for r in running if not self._ended(r)]
                left = self.deadline - time.monotonic()
                if left < -GRACE_S:
                    break
                while waiting and len(running) < self.processes and left > START_S / 2 + MARGIN_S:
                    running.append(self._start(waiting.pop(0), left - MARGIN_S))
                if not running:
                    if waiting:
                        say(f"no time is left to start {len(waiting)} runs; the same command goes on")
                    break
                time.sleep(0.2)
        finally:
            for run in running:
                self._end(run)

    def _start(self, run: Run, seconds: float) -> Run:
        run.directory.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, str(HERE / "train.py"), "--model", run.model, "--arm", run.arm, "--seed", str(run.seed),
            "--out", str(run.directory), "--seconds", f"{seconds:.0f}", *self.arguments,
        ]  # fmt: skip
        with (run.directory / "log").open("ab") as log:
            run.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        say(f"{run.name}: started at round {run.status()['rounds']}")
        return run

    def _ended(self, run: Run) -> bool:
        assert run.process is not None
        code = run.process.poll()
        if code is None:
            return False
        if code:
            run.said = {"status": "failed", "code": code, "log": _last_line(run.directory / "log")}
        say(
            f"{run.name}: {run.status()['status']} at round {run.status()['rounds']}"
            + (f", {run.said['log']}" if code else "")
        )
        return True

    def _end(self, run: Run) -> None:
        assert run.process is not None
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
            run.said = {"status": "ended", "log": "had not stopped when the time was over"}


def make_models(models: Sequence[str], cache: Path | None, processes: int) -> None:
    """Missing checkpoints, side by side; one that cannot be made ends the sweep, after the others beside it."""
    commands = [
        [sys.executable, str(HERE / "models.py"), m] + (["--cache", str(cache)] if cache else []) for m in models
    ]
    for start in range(0, len(commands), processes):
        begun = [subprocess.Popen(c, stdout=subprocess.DEVNULL) for c in commands[start : start + processes]]
        try:
            codes = [p.wait() for p in begun]  # of all of them, before any is an error
        finally:
            for process in begun:
                process.kill()
        if any(codes):
            raise SystemExit("error: a checkpoint could not be made\nhint: what stopped it is said above")


def merge(runs: Sequence[Run], out: Path) -> int:
    """All rounds of all runs into OUT/steps.parquet, and their ends into OUT/sweep.json; returns the number of rows."""
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {"runs": {}}
    for run in runs:
        path = run.directory / "steps.parquet"
        if path.exists():
            found, told = rows_at(path)
            rows += found
            about["runs"][run.name] = {k: v for k, v in told.items() if k != "schema_version"} | {"end": run.status()}
    write_table(out / "steps.parquet", rows, about)
    ends = {run.name: run.status() for run in runs}
    (out / "sweep.json").write_text(json.dumps(ends, indent=1), encoding="utf-8")
    return len(rows)


def _last_line(path: Path) -> str:
    """What stopped a run: its error with the hint, the exception that was raised last, else its last line."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [n for n in range(max(0, len(lines) - 4), len(lines)) if lines[n].startswith("error: ")]
    if errors:
        return "; ".join(lines[errors[-1] :])[:500]
    raised = [found[1] for line in lines if (found := RAISED.match(line))]  # warnings of what ends may follow it
    hint = "; hint: fewer --processes" if raised and "out of memory" in raised[-1] else ""
    return "; ".join(raised[-1:] or lines[-1:])[:500] + hint


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _listed(text: str) -> list[str]:
    """Parts without spaces around them, each once."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise argparse.ArgumentTypeError("names nothing; give a list such as a,b")
    return parts


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, such as 0,1") from None


def checked_runs(given: argparse.Namespace) -> list[Run]:
    """The plan. Raises SystemExit for what no run could be made of, before anything is started."""
    for arm in given.arms:
        arm_of(arm)
    for model in given.models:
        if model in RECIPES or model not in NAMES:
            recipe_of(model)
    regime_of(given.preset, given.set)
    for seed in given.seeds:
        check_seed(seed)
    if given.processes < 1:
        raise SystemExit(f"error: --processes cannot be {given.processes}\nhint: give at least 1")
    check_limits(seconds=given.seconds, stop_after=given.stop_after)
    check_contract(given.contract)
    if given.contract is not None and not any(arm_of(a).contract == ENGINE for a in given.arms):
        raise SystemExit(
            "error: --contract is for the arm engine, which is not among --arms\nhint: leave one out, or add the other"
        )
    runs = plan(given.models, given.arms, given.seeds, given.out)
    for run in runs:
        spec = Spec(
            model=run.model, arm=run.arm, seed=run.seed, preset=given.preset, overrides=tuple(given.set), engine=given.engine,
            contract=contract_for(run.arm, given.contract),
        )  # fmt: skip
        check_identity(spec, run.directory)
        if (run.directory / "steps.parquet").exists():
            rows_at(run.directory / "steps.parquet")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_listed, required=True, metavar="NAME,...", help=", ".join(NAMES))
    parser.add_argument(
        "--arms", type=_listed, default=list(ARMS), metavar="NAME,...", help=", ".join((*ARMS, *CONTROLS)) + " (default: all but the last two)"
    )  # fmt: skip
    parser.add_argument("--seeds", type=_seeds, default=[0], metavar="NUMBER,...", help="(default: 0)")
    parser.add_argument("--preset", default="calm", help="table of presets.toml (default: calm)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="override one value of the preset; may be repeated"
    )  # fmt: skip
    parser.add_argument("--engine", choices=MODES, default="eager", help="mode of vLLM (default: eager)")
    parser.add_argument("--contract", help="JSON of rpadiag fingerprint, or a preset, for the arm engine")
    parser.add_argument("--processes", type=int, default=8, help="runs at once (default: 8)")
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="for all of it, checkpoints included (default: 570)"
    )
    parser.add_argument(
        "--stop-after", type=int, metavar="ROUND", help="each run stops when so many rounds are done in all"
    )
    parser.add_argument("--cache", type=Path, help="directory of checkpoints (default: rpadiag's cache)")
    parser.add_argument(
        "--out", type=Path, required=True, help="gets a directory for each run, steps.parquet and sweep.json"
    )
    parser.add_argument("--list", action="store_true", help="print the plan and start nothing")
    given = parser.parse_args()
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    runs = checked_runs(given)
    regime = regime_of(given.preset, given.set)
    if given.list:
        for run in runs:
            print(f"{run.name}  {run.status()['status']}  {run.status()['rounds']} of {regime.rounds} rounds")
        print(
            f"about {estimate_s(runs, regime.rounds, given.processes):.0f} s more with {given.processes} processes, checkpoints not counted"
        )
        return
    least = START_S / 2 + MARGIN_S
    if given.seconds <= least and any(run.status()["status"] != "complete" for run in runs):
        raise SystemExit(
            f"error: --seconds {given.seconds:g} leaves no time for a run\nhint: give more than {least:g}; each run stops {MARGIN_S:g} s before the limit"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    needed = dict.fromkeys(run.model for run in runs if run.status()["status"] != "complete")
    make_models(list(needed), given.cache, given.processes)
    say(f"checkpoints are there after {time.monotonic() - started:.0f} s")
    arguments = ["--preset", given.preset, "--engine", given.engine]
    arguments += [part for text in given.set for part in ("--set", text)]
    for name, value in (("--contract", given.contract), ("--cache", given.cache), ("--stop-after", given.stop_after)):
        arguments += [] if value is None else [name, str(value)]
    stopped = False
    try:
        Sweep(runs, processes=given.processes, deadline=started + given.seconds, arguments=arguments).work()
    except KeyboardInterrupt:
        stopped = True
        say("stopped; the same command goes on from each run's last checkpoint")
    num = merge(runs, given.out)
    ends = [run.status()["status"] for run in runs]
    print(f"{num} rounds of {len(runs)} runs: " + ", ".join(f"{ends.count(e)} {e}" for e in dict.fromkeys(ends)))
    raise SystemExit(130 if stopped else 1 if "failed" in ends else 0)


if __name__ == "__main__":
    main()
