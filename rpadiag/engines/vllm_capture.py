"""Capture inside a vLLM worker: hooks on its modules, rows given back to the sequences they belong to.

vLLM packs the tokens of all running requests on one axis and may split a prompt over steps. Each step's
:class:`Slice` list says which rows belong to which sequence; every hook cuts its tensor by it and hands the
pieces to a :class:`rpadiag.engines.spool.Spool` at once, because vLLM's kernels work in place.

Written for the V1 engine with either of its model runners, against the source of vLLM 0.32.0; run on 0.26.0 as well
(docs/gpu-results.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rpadiag.engines.bundle_writer import BundleWriter, SequenceWriter
from rpadiag.engines.families import Source, family_for
from rpadiag.engines.spool import Spool
from rpadiag.engines.vllm_head import entropy_and_argmax
from rpadiag.engines.vllm_points import is_compiled, shard_widths
from rpadiag.engines.vllm_reduce import tap_reductions
from rpadiag.errors import CaptureError, RpadiagError
from rpadiag.sites import layer_site, reduced_site

if TYPE_CHECKING:
    from rpadiag.engines.families import Family


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows of one step that belong to one sequence: packed rows start .. start + count are its rows row .. ."""

    sequence: int
    start: int
    count: int
    row: int


@dataclass(kw_only=True)
class _Open:
    """A sequence being captured. heads: (first row, entropy, argmax) of rows of logits, where they were computed.

    given: tokens that its decode steps take in place of those that vLLM samples; None leaves vLLM its own.
    """

    writer: SequenceWriter
    token_ids: list[int]
    num_prompt_tokens: int
    num_rows: int  # rows fed so far
    max_rows: int
    given: list[int] | None = None
    positions: list[torch.Tensor] = field(default_factory=list)
    heads: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Entropy (NaN where no row of logits was seen) and argmax (-1 there) of every row, [T]."""
        entropy, argmax = np.full(self.max_rows, np.nan, np.float32), np.full(self.max_rows, -1, np.int32)
        for row, entropies, tokens in self.heads:
            entropy[row : row + len(tokens)] = entropies.cpu().numpy()
            argmax[row : row + len(tokens)] = tokens.cpu().numpy()
        return entropy, argmax


class Recorder:
    """Captures the sequences of one ``score`` call. Hooks never raise: :attr:`error` keeps the first error.

    An exception inside vLLM's step would leave its scheduler with requests that never finish.
    """

    def __init__(self, runner: Any, bundle: BundleWriter, sites: Sequence[str]) -> None:
        self.runner = runner
        self.model: torch.nn.Module = runner.get_model() if hasattr(runner, "get_model") else runner.model
        self.bundle = bundle
        self.sites = tuple(sites)
        self.error: RpadiagError | None = None
        self.fired: set[str] = set()
        self._open: dict[int, _Open] = {}
        self._slices: list[Slice] | None = None
        self._hidden: torch.Tensor | None = None
        self._scheduled: Any = None
        self._batch: Any = None
        self._undo: list[Callable[[], None]] = []
        self.spool = Spool.for_device(next(self.model.parameters()).device)
        config = self.model.config
        self._family: Family = family_for(config.architectures)
        self._facts = self._family.facts(config)
        num_ranks = runner.vllm_config.parallel_config.tensor_parallel_size
        self._widths = shard_widths(self._family, self._facts, num_ranks)

    def begin(self, sequence: int, token_ids: list[int], num_generate: int, given: list[int] | None = None) -> None:
        """Expect a sequence: its prompt, then ``num_generate`` tokens that vLLM samples, or the ``given`` ones, and is fed."""
        if given is not None and not hasattr(getattr(self.runner, "sampler", None), "sample"):
            raise CaptureError(
                "this vLLM cannot be made to decode given tokens",
                detail=f"the sampler of {type(self.runner).__name__} has no method sample",
                hint="leave out --generate",
            )
        rows = len(token_ids) + num_generate
        self._open[sequence] = _Open(
            writer=self.bundle.begin(sequence),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            num_rows=0,
            max_rows=rows,
            given=given,
        )

    def end(self, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, SequenceWriter]:
        """(positions [T], entropy [T-1], argmax [T-1], writer) of a finished sequence; its rows are all there."""
        opened = self._open.pop(sequence)
        self.spool.flush()
        entropy, argmax = opened.columns()
        if opened.num_rows < opened.max_rows or bool((argmax[:-1] < 0).any()):
            raise CaptureError(
                f"sequence {sequence} was seen for {opened.num_rows} of {opened.max_rows} tokens in engine vllm",
                detail=f"{int((argmax[:-1] >= 0).sum())} rows of logits were seen; tokens from a cache and steps inside a full CUDA "
                "graph are not",
                hint="start with enforce_eager=True (--mode eager), or leave attention outside of graphs: "
                """--engine-arg 'compilation_config={"cudagraph_mode": "PIECEWISE"}'""",
            )
        positions = torch.cat(opened.positions)[: opened.max_rows].numpy()
        return positions, entropy[:-1], argmax[:-1], opened.writer

    # -- attaching ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register every hook. A site whose module this vLLM does not have is a CaptureError."""
        self._wrap(self.runner, "execute_model", before=self._on_scheduled)
        if hasattr(self.runner, "prepare_inputs"):  # the second model runner keeps its batch local
            self._wrap(self.runner, "prepare_inputs", after=self._on_batch)
        if hasattr(getattr(self.runner, "sampler", None), "sample"):
            self._wrap(self.runner.sampler, "sample", after=self._on_sampled)
        model = self.model
        self._hook(model.register_forward_pre_hook(self._on_forward, with_kwargs=True))
        self._hook(model.register_forward_hook(self._on_hidden))
        self._hook(model.get_submodule("logits_processor").register_forward_hook(self._on_logits))
        if is_compiled(self.runner):
            self._attach_attention()
            return
        inputs: dict[str, list[tuple[str, Source]]] = {}
        outputs: dict[str, list[tuple[str, Source]]] = {}
        for site in self.sites:
            if site in ("logits", "logprob") or reduced_site(site):
                continue
            path, source = self._family.source(site, stack="rollout", num_layers=self._facts.num_layers)
            (inputs if source.take == "input" else outputs).setdefault(path, []).append((site, source))
        for path, wanted in inputs.items():
            self._hook(self._module(path, wanted).register_forward_pre_hook(self._reader(wanted), with_kwargs=True))
        for path, wanted in outputs.items():
            self._hook(self._module(path, wanted).register_forward_hook(self._reader(wanted, output=True)))
        if reduced := {site: given for site in self.sites if (given := reduced_site(site))}:
            self._undo += tap_reductions(
                {self._module_of(given): site for site, given in reduced.items()}, self._record
            )

    def _module_of(self, site: str) -> torch.nn.Module:
        path, source = self._family.source(site, stack="rollout", num_layers=self._facts.num_layers)
        return self._module(path, [(site, source)])

    def _attach_attention(self) -> None:
        """Read q, k, v and the output of each layer's attention where the compiled graph calls it."""
        for layer in range(self._facts.num_layers):
            points = {p: layer_site(layer, p) for p in ("q_rope", "k_rope", "v", "attn")}
            points = {p: site for p, site in points.items() if site in self.sites}
            if not points:
                continue
            path = self._family.rollout["q_rope"].path(layer, self._facts.num_layers)
            attention: Any = self._module(path, [(site, Source(module=path)) for site in points.values()])

            def before(_layer: Any, *qkv: Any, points: dict[str, str] = points, **_: Any) -> None:
                for point, tensor in zip(("q_rope", "k_rope", "v"), qkv, strict=False):
                    if point in points:
                        self._record(points[point], tensor)

            def after(result: Any, points: dict[str, str] = points, **kwargs: Any) -> None:
                if "attn" in points:
                    self._record(points["attn"], result if result is not None else kwargs["output"])

            self._wrap(attention.impl, "forward", before=before, after=after)

    def detach(self) -> None:
        """Take every hook and wrapper back."""
        while self._undo:
            self._undo.pop()()
        self.spool.drop()

    def check_fired(self) -> None:
        """CaptureError unless every requested site fired."""
        wanted = [s for s in self.sites if s != "logprob"]
        silent = [s for s in wanted if s not in self.fired]
        if silent:
            path, _ = self._family.source(silent[0], stack="rollout", num_layers=self._facts.num_layers)
            raise CaptureError(
                f"site {silent[0]} was requested but never fired in engine vllm",
                detail=f"{len(wanted) - len(silent)} of {len(wanted)} sites fired; module {path} was not called",
                hint="modules inside a compiled model are not called: start with enforce_eager=True",
            )

    def _module(self, path: str, wanted: list[tuple[str, Source]]) -> torch.nn.Module:
        try:
            return self.model.get_submodule(path)
        except AttributeError as error:
            raise CaptureError(
                f"site {wanted[0][0]} cannot be captured in engine vllm",
                detail=f"family {self._family.name} maps it to {path}, which {type(self.model).__name__} does not have",
                hint="this vLLM version lays the model out differently; ask for other sites",
            ) from error

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _wrap(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Shadow a method on its instance until :meth:`detach`. ``after`` gets the result and the keyword arguments."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after(result, **kwargs)
            return result

        setattr(owner, name, call)
        self._undo.append(lambda: delattr(owner, name))

    # -- one step ----------------------------------------------------------------------------------

    def _on_scheduled(self, scheduler_output: Any = None, *_: Any, **__: Any) -> None:
        self._scheduled = scheduler_output
        self._batch = self._slices = self._hidden = None

    def _on_batch(self, batch: Any, **_: Any) -> None:
        self._batch = batch

    def _on_forward(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._scheduled is None or self.error is not None:
            return
        counts = self._scheduled.num_scheduled_tokens
        request_ids = (self._batch if self._batch is not None else self.runner.input_batch).req_ids
        slices, start = [], 0
        for request_id in request_ids:
            if request_id not in counts:
                continue
            sequence, count = int(request_id.split("-")[0]), int(counts[request_id])
            opened = self._open[sequence]
            slices.append(Slice(sequence=sequence, start=start, count=count, row=opened.num_rows))
            start += count
        self._slices = slices
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        try:
            for piece in slices:
                self._take_tokens(piece, named.get("input_ids"), named["positions"])
        except RpadiagError as error:
            self.error = error

    def _take_tokens(self, piece: Slice, input_ids: torch.Tensor | None, positions: torch.Tensor) -> None:
        """Note a slice's positions, and check that its tokens are the sequence's own."""
        opened = self._open[piece.sequence]
        rows = slice(piece.start, piece.start + piece.count)
        opened.positions.append(positions[rows].to("cpu", torch.int64, copy=True))
        position = int(opened.positions[-1][0])
        if position != piece.row:
            raise CaptureError(
                f"sequence {piece.sequence} continued at position {position} after {piece.row} rows",
                detail="vLLM took tokens from its cache or computed some again",
                hint="start the engine with a larger max_model_len, or score fewer sequences together",
            )
        opened.num_rows += piece.count
        if input_ids is None:
            return
        fed = input_ids[rows].tolist()
        prompt = opened.token_ids[piece.row : piece.row + piece.count]
        if fed[: len(prompt)] != prompt:
            raise CaptureError(
                f"vLLM was fed other tokens than those of sequence {piece.sequence}",
                detail=f"rows {piece.row} to {piece.row + piece.count}: fed {fed[:8]}, expected {prompt[:8]}",
            )

    def _on_hidden(self, _module: Any, _args: Any, output: Any) -> None:
        self._hidden = output[0] if isinstance(output, tuple) else output
        if "final_norm" in self.sites and is_compiled(self.runner):
            self._record("final_norm", self._hidden)

    def _reader(self, wanted: list[tuple[str, Source]], *, output: bool = False) -> Callable[..., None]:
        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = args or tuple(kwargs.values())
            for site, source in wanted:
                self._record(site, values[source.index])

        def after(_module: Any, _args: Any, result: Any) -> None:
            for site, source in wanted:
                if source.take == "slice":
                    fused = result[0] if isinstance(result, tuple) else result
                    begin = sum(self._widths[p] for p in source.parts[: source.index])
                    self._record(site, fused[:, begin : begin + self._widths[source.parts[source.index]]])
                else:
                    self._record(site, result[source.index] if isinstance(result, tuple) else result)

        return after if output else before

    def _record(self, site: str, tensor: torch.Tensor) -> None:
        if self._slices is None or self.error is not None:
            return
        self.fired.add(site)
        try:
            for piece in self._slices:
                opened = self._open[piece.sequence]
                count = min(piece.count, opened.max_rows - piece.row)
                if count > 0:
                    rows = tensor[piece.start : piece.start + count]
                    self.spool.append(opened.writer, site, rows, row=piece.row)
        except RpadiagError as error:
            self.error = error

    def _on_sampled(self, result: Any, **_: Any) -> None:
        """Put given tokens in place of the sampled ones, before vLLM looks up their logprobs.

        result: (sampled [requests], ...) of either runner's sampler, in the order of the step's requests.
        """
        for index, piece in enumerate(self._slices or ()):
            opened = self._open[piece.sequence]
            step = opened.num_rows - opened.num_prompt_tokens
            if opened.given is not None and 0 <= step < len(opened.given):
                result[0][index] = opened.given[step]

    # -- logits ------------------------------------------------------------------------------------

    def _on_logits(self, _module: Any, args: tuple[Any, ...], logits: torch.Tensor | None) -> None:
        """Attribute a call of the head: prompt rows are a view of the step's hidden states, sampling a gather.

        vLLM computes a prompt's last row with the sampling rows and the rows before it in calls of their own.
        """
        if self._slices is None or self._hidden is None or logits is None or self.error is not None:
            return
        given, hidden = args[1], self._hidden
        try:
            if given.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr():
                first = (given.data_ptr() - hidden.data_ptr()) // (hidden.element_size() * hidden.stride(0))
                self._prompt_logits(first, logits)
            else:
                self._sampling_logits(logits)
        except RpadiagError as error:
            self.error = error

    def _prompt_logits(self, first: int, logits: torch.Tensor) -> None:
        assert self._slices is not None
        for piece in self._slices:
            opened = self._open[piece.sequence]
            last = piece.start + min(piece.count, opened.num_prompt_tokens - 1 - piece.row)
            begin, end = max(first, piece.start), min(first + logits.shape[0], last)
            if begin < end:
                self._take_logits(opened, piece.row + begin - piece.start, logits[begin - first : end - first])

    def _sampling_logits(self, logits: torch.Tensor) -> None:
        assert self._slices is not None
        for index, piece in enumerate(self._slices):
            opened = self._open[piece.sequence]
            row = piece.row + piece.count - 1
            if opened.num_prompt_tokens - 1 <= row < opened.max_rows:
                self._take_logits(opened, row, logits[index : index + 1])

    def _take_logits(self, opened: _Open, row: int, logits: torch.Tensor) -> None:
        opened.heads.append((row, *entropy_and_argmax(logits)))
        if "logits" in self.sites:
            self.fired.add("logits")
            self.spool.append(opened.writer, "logits", logits, row=row)


class CaptureExtension:
    """Mixed into vLLM's worker through ``worker_extension_cls``; called by name with ``collective_rpc``."""

    model_runner: Any

    def rpadiag_recorder(self, bundle: BundleWriter, sites: list[str]) -> Recorder:
        """A recorder on this worker's model, not yet attached."""
        return Recorder(self.model_runner, bundle, sites)
