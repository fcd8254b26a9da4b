"""``FullyShardedReducer``: each copy of a stage keeps rows of weights, sums and optimizer state.

Rajbhandari et al., arXiv 1910.02054, stages 2 and 3. What a copy computes with is gathered
(``engine.weights.sharded_layers``); sums are made of the rows that it keeps, layer by layer, in the
order of the copies, so that they have the bits of ``owners``. Weights travel when they are next
used, so nothing comes back behind an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.reduce.rows import RowReducer
from penstock.engine.reduce.sharding import Shard
from penstock.engine.transport import Edge, Transport, groups
from penstock.engine.weights.sharded_layers import ShardedLayers


class CopiesOfStage:
    """The copies of a stage, as one of them reaches the others through torch (``Copies``).

    Args:
        group: of their processes.
        ranks: theirs.
        rank: this one's.
        transport: knows how long to wait.
        exchanging: what rows are exchanged for, in words.

    Attributes:
        group: as given.
        size: how many there are.
        index: which one this is.
        closed: whether the group is used no more.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        transport: Transport,
        exchanging: str = "summing gradients",
    ) -> None:
        self.group = group
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.closed = False
        self._others = " or ".join(str(other) for other in ranks if other != rank)
        self._rank = rank
        self._transport = transport
        self._exchanging = exchanging
        groups.lend(group, self)

    def release(self) -> None:
        """The group has been destroyed, and nobody asks it any more."""

    def close(self, *, failed: bool) -> None:
        if failed and not self.closed:
            groups.end(self.group)
        self.closed = True

    def gather(self, output: Tensor, own: Tensor) -> None:
        # torch before 2.13 has the same by another name, which later ones warn of.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        ask = partial(gather, output, own)
        self._done(ask, "gathering the weights of a layer")

    def exchange(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> None:
        ask = partial(dist.all_to_all_single, output, own, output_sizes, own_sizes)
        self._done(ask, self._exchanging)

    def largest(self, numbers: Tensor) -> None:
        ask = partial(dist.all_reduce, numbers, op=dist.ReduceOp.MAX)
        self._done(ask, "comparing which gradients there are")

    def add(self, numbers: Tensor) -> None:
        self._done(partial(dist.all_reduce, numbers), "adding the norms of gradients")

    def take_first(self, values: Tensor) -> None:
        ask = partial(dist.broadcast, values, group_src=0)
        self._done(ask, "taking the weights that the first copy has")

    def _done(self, ask: Callable[..., Any], doing: str) -> None:
        where = f"rank {self._rank}, {doing}"
        try:
            work = ask(group=self.group, async_op=True)
        except RuntimeError as error:
            raise groups.lost(where, self._others) from error
        groups.wait(work, self._transport.patience, self._others, where)


class FullyShardedReducer(RowReducer):
    """Sums of the weights of a stage, of which each copy has rows.

    Args:
        shared: of one stage.
        sharded: the stages of this rank that have copies, by their numbers.

    Attributes:
        layers: of the stage.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        sharded: Mapping[int, ShardedLayers],
    ) -> None:
        (self.stage,) = shared.stages
        self.layers = sharded[self.stage]
        self.shards = {
            own.whole: Shard(own.start, own.rows if own.rows.shape[0] else None)
            for own in self.layers.parameters
        }
        self._rows = {own.whole: own.rows for own in self.layers.parameters}

    def hand_in(self, number: int, num_gathered: int) -> None:
        """Nothing leaves before all meet."""

    def advance(self, *, averages: bool) -> None:
        self.layers.sum()

    def finish(self) -> None:
        """Rows have their sums."""

    def rows_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        return self._rows.get(parameter)

    def norms(self) -> dict[nn.Parameter, Tensor]:
        return {
            own.whole: norm
            for own, norm in zip(self.layers.parameters, self.layers.norms(), strict=True)
        }

    def gather(self, num_microbatches: int) -> None:
        self.layers.begin(num_microbatches)

    def drop(self) -> None:
        self.layers.drop()

    def close(self, *, failed: bool) -> None:
        self.layers.close(failed=failed)

    def outgoing(self) -> set[Edge]:
        return set()
