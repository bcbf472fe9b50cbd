"""What ``rpadiag capture`` knows before it loads a model: tokens, sites, the exact size of the bundle, and whether it fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rpadiag.errors import InputError, UsageError
from rpadiag.sites import match_sites, split_site
from rpadiag.workflows.inputs import Prompted, read_prompts, resolve_device, token_texts
from rpadiag.workflows.options import CaptureOptions
from rpadiag.workflows.progress import Progress
from rpadiag.workflows.smollm2 import resolve_model

if TYPE_CHECKING:
    from rpadiag.engines.base import ModelFacts, TokenSequence
    from rpadiag.prompts import Prompt


class Tokenizer:
    """The checkpoint's tokenizer, loaded when it is first needed."""

    def __init__(self, model: str, options: CaptureOptions) -> None:
        self._load = (model, options.revision, options.trust_remote_code)
        self._found: Any = None

    def __call__(self) -> Any:
        from rpadiag.engines.checkpoint import load_tokenizer

        if self._found is None:
            model, revision, trusted = self._load
            self._found = load_tokenizer(model, revision=revision, trust_remote_code=trusted)
        return self._found

    @cached_property
    def _or_none(self) -> Any:
        try:
            return self()
        except InputError:
            return None

    def texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """Each token's text; None without a tokenizer."""
        return token_texts(self._or_none, token_ids)


@dataclass(frozen=True, kw_only=True)
class Job(Prompted):
    """What is captured, known before anything is loaded. sites: those that are asked for, in execution order."""

    facts: ModelFacts
    config: Mapping[str, Any]
    sites: tuple[str, ...]
    widths: Mapping[str, int]
    tokenizer: Tokenizer


def prepare(options: CaptureOptions, progress: Progress) -> Job:
    from rpadiag.engines import checkpoint
    from rpadiag.engines.config_facts import config_facts
    from rpadiag.engines.families import family_for
    from rpadiag.engines.vllm_points import full_widths, observable

    model = resolve_model(options.model, progress)
    config = checkpoint.load_config(model, revision=options.revision, trust_remote_code=options.trust_remote_code)
    family = family_for(config.architectures)
    facts = family.facts(config)
    tokenizer = Tokenizer(model, options)
    prompts, sequences = _sequences(options, facts, tokenizer)
    chosen = match_sites(options.sites, list(facts.sites_over(options.tp)))
    if not options.sites:  # a site that was asked for and cannot be seen is an error later
        chosen = observable(chosen, compiled=options.mode == "compiled")
    return Job(
        model=model,
        device=resolve_device(options.device),
        dtype=str(checkpoint.resolve_dtype(options.dtype, config)).removeprefix("torch."),
        prompts=prompts,
        sequences=sequences,
        facts=facts,
        config=config_facts(config),
        sites=tuple(s for s in chosen if s != "logprob"),
        widths=full_widths(family, facts, options.tp),
        tokenizer=tokenizer,
    )


def _sequences(
    options: CaptureOptions, facts: ModelFacts, tokenizer: Callable[[], Any]
) -> tuple[Sequence[Prompt], tuple[TokenSequence, ...]]:
    """Prompts and tokens from a prompt file, or the tokens of a bundle."""
    if not (options.prompts / "bundle.json").exists():
        return read_prompts(options, facts, tokenizer, num_generate=options.generate)
    from rpadiag.engines.base import TokenSequence, check_scoring
    from rpadiag.engines.bundle import open_bundle
    from rpadiag.prompts import Prompt

    if options.max_tokens is not None:
        raise UsageError("--max-tokens cuts the prompts of a file; a bundle's tokens are taken as they are")
    bundle = open_bundle(options.prompts)
    sequences = bundle.sequences
    if options.engine != "trainer":  # it computes them all as a prompt, whoever sampled them
        sequences = [
            TokenSequence(prompt=s.prompt, token_ids=s.token_ids, num_prompt_tokens=len(s.token_ids)) for s in sequences
        ]
    check_scoring(facts, sequences, sites=(), num_generate=options.generate, max_tokens=facts.max_positions)
    prompts = [
        Prompt(
            index=s.prompt,
            text=bundle.text(i) or "",
            token_ids=s.token_ids,
            origin=f"{options.prompts.name}:{s.prompt}",
        )
        for i, s in enumerate(sequences)
    ]
    return prompts, tuple(sequences)


def size_in_words(job: Job, num_generate: int, numbers: Sequence[int]) -> str:
    """Bytes of the tensors of these sequences in words, with the formula."""
    lengths, elements = _lengths(job, num_generate, numbers), _elements(job)
    total = _num_bytes(job, num_generate, numbers)
    return (
        f"{_mib(total)}: {sum(lengths):,} tokens x {elements:,} elements x {_itemsize(job.dtype)} bytes, and for each token its "
        f"position and scores ({len(lengths):,} sequences)"
    )


def _num_bytes(job: Job, num_generate: int, numbers: Sequence[int]) -> int:
    from rpadiag.engines.bundle_collect import num_bytes_of

    return num_bytes_of(_lengths(job, num_generate, numbers), _elements(job), _itemsize(job.dtype))


def _lengths(job: Job, num_generate: int, numbers: Sequence[int]) -> list[int]:
    return [len(job.sequences[i].token_ids) + num_generate for i in numbers]


def _elements(job: Job) -> int:
    return sum(job.widths[split_site(site)[1]] for site in job.sites)


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def check_disk(options: CaptureOptions, job: Job, todo: Sequence[int]) -> None:
    """InputError unless the disk holds what is still to be captured, and two sequences of scratch space beside it."""
    largest = max(todo, key=lambda i: len(job.sequences[i].token_ids))
    need = _num_bytes(job, options.generate, todo) + 2 * _num_bytes(job, options.generate, [largest])
    where = options.bundle.absolute()
    free = shutil.disk_usage(next(p for p in (where, *where.parents) if p.exists())).free
    if need <= free:
        return
    head = job.widths["logits"] * _itemsize(job.dtype) * sum(_lengths(job, options.generate, todo))
    without = f"; without logits it is {_mib(head)} less" if "logits" in job.sites else ""
    raise InputError(
        f"bundle {options.bundle} needs {_mib(need)}, and its disk has {_mib(free)} free",
        detail=f"{size_in_words(job, options.generate, todo)}; two sequences of scratch space are counted in",
        hint=f"capture fewer sites (--sites) or tokens (--max-tokens), or write to another disk{without}",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"
