"""A trainer whose weights are cut over the ranks of torchrun: by FSDP2, or by torch's tensor parallelism.

Rank 0 is used like any other :class:`rpadiag.engines.trainer.TrainerEngine`; what it is asked to run it tells the other ranks first,
which run the same with :func:`follow`. Sites come out whole: FSDP2 gathers weights, so every rank computes every element, and
the bits are those of the unsharded trainer; tensor parallelism cuts columns, which are gathered side by side, and sums the output and down
projections over ranks, where it may differ by the rounding of that sum.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from rpadiag.engines import digests, stacked
from rpadiag.engines.base import TokenScores
from rpadiag.engines.ranks import Ranks, answering
from rpadiag.engines.trainer import TrainerEngine
from rpadiag.engines.trainer_capture import OnSite
from rpadiag.errors import CaptureError, InputError, NotComparableError, RpadiagError, UsageError, from_plain
from rpadiag.sites import split_site

SHARDINGS = ("fsdp", "tp")
COLUMNS = ("q", "k", "v", "gate", "up")  # cut along their output
ROWS = ("o", "down")  # cut along their input, and summed over ranks


class ShardedTrainer(TrainerEngine):
    """Made by :meth:`over` on every rank. Methods are called on rank 0 and carried out on all."""

    ranks: Ranks
    sharding: str
    alignment: Any
    _reads: dict[str, tuple[str, ...]]

    @classmethod
    def over(cls, ranks: Ranks, sharding: str, model: str, **arguments: Any) -> Self:
        """Load ``model`` on every rank and keep this rank's part. arguments: of :meth:`TrainerEngine.load` but ``device``.

        Raises what loading raises on any rank, on all of them; UsageError for a model that does not divide.
        """
        if ranks.rank == 0:
            ranks.tell({"do": "over", "sharding": sharding, "model": model, **arguments})
        failed: RpadiagError | None = None
        engine = None
        try:
            engine = cls.load(model, device="cpu", **arguments)
            engine._check_divides(ranks.size, sharding)
        except RpadiagError as error:
            failed = error
        for rank, plain in enumerate(ranks.gather(None if failed is None else failed.to_plain())):
            if plain is not None:
                raise from_plain(plain, place=f"rank {rank}: " if rank else "")
        assert engine is not None
        engine.ranks, engine.sharding = ranks, sharding
        engine._reads = {}
        engine._cut()
        return engine

    # -- cutting -----------------------------------------------------------------------------------

    def _check_divides(self, size: int, sharding: str) -> None:
        facts = self.facts
        if sharding == "fsdp":
            return
        if facts.expert_layers:
            raise UsageError(
                "tensor parallelism of the trainer has no plan for layers with experts", hint="use --shard fsdp"
            )
        for what, number in (
            ("heads", facts.num_heads), ("key heads", facts.num_kv_heads), ("intermediate columns", facts.intermediate_size),
        ):  # fmt: skip
            if number % size:
                raise UsageError(
                    f"{number} {what} do not divide by {size} ranks",
                    detail="tensor parallelism cuts by whole heads and equal columns",
                    hint="use --shard fsdp, which cuts any model, or another number of ranks",
                )

    def _cut(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        device = self.ranks.device.partition(":")[0]
        with answering():
            mesh = init_device_mesh(device, (self.ranks.size,))
            if self.sharding == "fsdp":
                from torch.distributed.fsdp import fully_shard

                for layer in range(self.facts.num_layers):
                    fully_shard(self._layer(layer), mesh=mesh)
                fully_shard(self.model, mesh=mesh)
            else:
                self._cut_products(mesh)
            self.model.to(self.ranks.device)
            self._logits([[0, 0]])  # FSDP2 finds its root in the first forward

    def _cut_products(self, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for layer in range(self.facts.num_layers):
            module = self._layer(layer)
            names = {id(m): name for name, m in module.named_modules()}
            plan: dict[str, Any] = {}
            for point in (*COLUMNS, *ROWS):
                part = self.model.get_submodule(self.family.trainer[point].path(layer, self.facts.num_layers))
                plan[names[id(part)]] = ColwiseParallel() if point in COLUMNS else RowwiseParallel()
            parallelize_module(module, mesh, plan)

    def _layer(self, number: int) -> nn.Module:
        path = self.family.trainer["input_norm"].path(number, self.facts.num_layers)
        return self.model.get_submodule(path.rpartition(".")[0])

    # -- what is carried out on all ranks ----------------------------------------------------------

    def _tell(self, do: str, **arguments: Any) -> None:
        if self.ranks.rank == 0:
            self.ranks.tell({"do": do, **arguments})

    def manifest(self) -> dict[str, Any]:
        return {**super().manifest(), "sharding": {"by": self.sharding, "num_ranks": self.ranks.size}}

    def weight_digests(self) -> dict[str, str]:
        self._tell("weight_digests")
        if self.sharding == "fsdp":
            model: Any = self.model
            model.reshard()  # the root's weights stay whole after a forward, and what numpy has looked at cannot be freed
        whole = ((name, _whole(p)) for name, p in self.model.named_parameters())
        with answering():
            return digests.weight_digests(stacked.checkpoint_tensors(whole))

    def forward(
        self,
        token_ids: Sequence[int],
        *,
        sites: Sequence[str] = (),
        on_site: OnSite | None = None,
        positions: Sequence[int] | None = None,
        **more: Any,
    ) -> TokenScores:
        self._tell("forward", token_ids=list(token_ids), sites=list(sites), positions=positions, **more)

        def whole(site: str, tensor: torch.Tensor) -> None:
            full = self._beside(site, tensor)
            if on_site is not None:
                on_site(site, full)

        with answering():
            return super().forward(token_ids, sites=sites, on_site=whole, positions=positions, **more)

    def forward_padded(self, sequences: Sequence[Sequence[int]], **more: Any) -> list[TokenScores]:
        self._tell("forward_padded", sequences=[list(s) for s in sequences], **more)
        with answering():
            return super().forward_padded(sequences, **more)

    def replay(
        self,
        site: str,
        inputs: Sequence[torch.Tensor],
        *,
        positions: Sequence[int] | torch.Tensor | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> torch.Tensor:
        if split_site(site)[1] == "logprob":
            return super().replay(site, inputs, token_ids=token_ids)
        self._tell("replay", site=site, inputs=list(inputs), positions=positions, token_ids=token_ids)
        given = list(inputs)
        if self.sharding == "tp" and split_site(site)[1] in ROWS:
            given = [t.chunk(self.ranks.size, dim=1)[self.ranks.rank] for t in given]
        with self._unsharded(site), answering():
            out = super().replay(site, given, positions=positions, token_ids=token_ids)
            return self._beside(site, out.to(self.ranks.device)).to(out.device)

    def reads(self, site: str) -> tuple[str, ...]:
        if site not in self._reads:
            self._tell("reads", site=site)
            with self._unsharded(site), answering():
                self._reads[site] = super().reads(site)
        return self._reads[site]

    def align(self, regions: Sequence[str], contract: str) -> Any:
        """:func:`rpadiag.align` of the model, on every rank."""
        from rpadiag.regions.align import align

        self._tell("align", regions=list(regions), contract=contract)
        self._reads.clear()
        self.alignment = align(self.model, regions=tuple(regions), contract=contract)
        return self.alignment

    # -- parts ---------------------------------------------------------------------------------------

    def _beside(self, site: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a site of which this rank may have some columns."""
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        full = self.family.widths(self.facts)[split_site(site)[1]]
        return self.ranks.beside(tensor) if tensor.shape[1] * self.ranks.size == full else tensor

    @contextlib.contextmanager
    def _unsharded(self, site: str) -> Iterator[None]:
        """While the block runs an operation can be called alone.

        FSDP2's weights of its layer, the one below and the root are whole. Products that tensor parallelism has cut are as they were before,
        unless the operation is one of them: a replay hands whole tensors to what stands in for them.
        """
        if self.sharding == "tp":
            with self._plain_products(split_site(site)[1]):
                yield
            return
        layer = split_site(site)[0]
        last = self.facts.num_layers - 1 if layer is None else layer
        modules: list[Any] = [self.model, *(self._layer(n) for n in range(max(0, last - 1), last + 1))]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()

    @contextlib.contextmanager
    def _plain_products(self, point: str) -> Iterator[None]:
        taken: list[tuple[Any, Any, Any]] = []
        if point not in (*COLUMNS, *ROWS):
            for layer in range(self.facts.num_layers):
                for name in (*COLUMNS, *ROWS):
                    module = self.model.get_submodule(self.family.trainer[name].path(layer, self.facts.num_layers))
                    taken.append((module, module._forward_pre_hooks, module._forward_hooks))
                    module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            for module, before, after in taken:
                module._forward_pre_hooks, module._forward_hooks = before, after


def _whole(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found


def aligned(engine: TrainerEngine, regions: Sequence[str], contract: str) -> Any:
    """:func:`rpadiag.align` of an engine's model, on every rank that holds a part of it."""
    if isinstance(engine, ShardedTrainer):
        return engine.align(regions, contract)
    from rpadiag.regions.align import align

    return align(engine.model, regions=tuple(regions), contract=contract)


def follow(ranks: Ranks) -> None:
    """Every rank but the first: do what rank 0 tells until it ends; raises what rank 0 ended with."""
    engine: ShardedTrainer | None = None
    while (command := ranks.hear()) is not None:
        do = command.pop("do")
        if do == "fail":
            raise from_plain(command["error"], place="rank 0: ")
        if do == "over":
            engine = None  # its memory goes before the next one's is taken
            with contextlib.suppress(RpadiagError):  # rank 0 has it too, and ends the others with it
                engine = ShardedTrainer.over(ranks, command.pop("sharding"), command.pop("model"), **command)
        elif engine is not None:
            with contextlib.suppress(InputError, UsageError, CaptureError, NotComparableError):  # of rank 0 as well
                getattr(engine, do)(**command)
