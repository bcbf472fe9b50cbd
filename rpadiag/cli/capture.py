"""``rpadiag capture``: run one stack and keep what it computed, to be compared elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rpadiag.cli import options as shared
from rpadiag.cli.bars import progress_on_stderr
from rpadiag.cli.output import hint, print_json, say
from rpadiag.workflows.options import ENGINES, TIMEOUT_S, CaptureOptions


def capture(
    context: typer.Context,
    model: shared.Model,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS",
            help="A prompt file, as compare takes it; or a bundle, whose tokens are taken, generated ones included.",
        ),
    ],
    engine: Annotated[
        str, typer.Option("--engine", metavar="|".join(ENGINES), help="The stack to run; emulated needs no vLLM.")
    ],
    bundle: Annotated[Path, typer.Option("--bundle", metavar="DIR", help="Directory to write.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the bundle that an interrupted capture left in DIR.")
    ] = False,
    emulate: shared.Emulate = None,
    dtype: shared.Dtype = "bfloat16",
    device: shared.Device = "auto",
    mode: shared.Mode = "eager",
    tp: shared.TensorParallel = 1,
    attention: shared.Attention = "sdpa",
    sites: shared.Sites = None,
    max_tokens: shared.MaxTokens = None,
    generate: shared.Generate = 0,
    align: shared.Align = None,
    contract: shared.AlignContract = None,
    shard: shared.Shard = "prompts",
    engine_arg: shared.EngineArguments = None,
    timeout: shared.Timeout = TIMEOUT_S,
    seed: shared.Seed = 0,
    revision: shared.Revision = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    output_format: shared.Format = "table",
) -> None:
    """Run one stack on the prompts and write its tensors, scores and facts to DIR.

    Two bundles of the same tokens are compared with rpadiag compare --trainer DIR --rollout DIR, where neither engine
    needs to be installed. The size is printed first, and refused where the disk is too small.
    """
    shared.check_format(output_format)
    options = CaptureOptions(
        model=model,
        prompts=prompts,
        engine=engine,
        bundle=bundle,
        resume=resume,
        emulate=emulate,
        dtype=dtype,
        device=device,
        mode=mode,
        tp=tp,
        attention=attention,
        sites=tuple(sites or ()),
        max_tokens=max_tokens,
        generate=generate,
        align=shared.aligned_of(align),
        contract=contract,
        shard=shard,
        engine_args=tuple(engine_arg or ()),
        timeout_s=timeout,
        seed=seed,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    from rpadiag.prompts import check_prompt_file

    shared.check_contract(emulate)
    shared.check_contract(contract)
    shared.require_stacks(vllm=engine == "vllm")
    if not (prompts / "bundle.json").exists():
        check_prompt_file(prompts)
    from rpadiag.workflows.capture import run_capture
    from rpadiag.workflows.sharding import under_ranks

    given = shared.given_options(context)
    try:
        with progress_on_stderr() as progress:
            captured = under_ranks(options, lambda mine: run_capture(mine, progress, given=given), splits_prompts=False)
    except KeyboardInterrupt:
        print(f"interrupted; {bundle} keeps the sequences that were finished", file=sys.stderr)
        hint("the same command with --resume goes on")
        raise
    if captured is None:  # another process of this torchrun has the answer
        return
    if output_format == "json":
        print_json({"bundle": str(bundle), **{k: v for k, v in vars(captured).items() if k != "bundle"}})
        return
    resumed = f" ({captured.num_resumed:,} of them were there)" if captured.num_resumed else ""
    say(
        f"{captured.num_sequences:,} sequences{resumed}, {captured.num_tokens:,} tokens of {captured.label}, "
        f"{captured.num_bytes / 2**20:,.1f} MiB"
    )
    say(f"bundle: {bundle}")
    ours, theirs = (bundle, "BUNDLE") if engine == "trainer" else ("BUNDLE", bundle)
    hint(f"rpadiag compare --trainer {ours} --rollout {theirs} --run RUN, with a bundle of the other stack")
