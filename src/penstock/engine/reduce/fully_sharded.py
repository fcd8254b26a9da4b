"""``FullyShardedReducer``: each copy of a stage keeps rows of weights, sums and optimizer state.

Rajbhandari et al., arXiv 1910.02054, stages 2 and 3. What a copy computes with is gathered
(``engine.weights.sharded_layers``); sums are made of the rows that it keeps, layer by layer, in the
order of the copies, so that they have the bits of ``owners``. Weights travel when they are next
used, so nothing comes back behind an update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.base.errors import RunError
from penstock.engine.reduce.reducer import GradientWatch, SharedWeights
from penstock.engine.reduce.rows import RowReducer
from penstock.engine.reduce.sharding import Shard
from penstock.engine.transport import Edge, Transport, groups
from penstock.engine.weights.sharded_layers import ShardedLayers, SumInParts
from penstock.planning.plans.summing import Summing

_PAIR = 2


class HomeGroups(NamedTuple):
    """Torch's process groups of the copies of a stage, as one of them has them.

    Attributes:
        every: of all copies.
        inside: of those that have the weights together, this one among them. It is another one than
            ``every`` where these are all copies, too: who compares what was gathered must not wait
            for what only some have asked for.
        between: of those that have the same shard, this one among them, in the order of their
            hosts; ``None`` where no other copy has.
        ranks: of all copies.
        near: of ``inside``.
    """

    every: dist.ProcessGroup
    inside: dist.ProcessGroup
    between: dist.ProcessGroup | None
    ranks: Sequence[int]
    near: Sequence[int]

    @classmethod
    def of_one(cls, group: dist.ProcessGroup, ranks: Sequence[int]) -> HomeGroups:
        """Those of copies that do everything in one group."""
        return cls(group, group, None, ranks, ranks)


def make_homes(
    homes: Mapping[int, Sequence[int]], summing: Summing, rank: int, seconds: float
) -> dict[int, HomeGroups]:
    """The groups of the stages that a rank has copies of. All ranks call it.

    Args:
        homes: the ranks of each stage that has copies.
        summing: the plan's; its outermost levels say which copies have the weights together.
        seconds: how long ranks wait for each other.
    """
    teams = {stage: summing.shard_groups(ranks) for stage, ranks in homes.items()}
    kinds = {
        stage: (
            [ranks],
            teams[stage],
            [*zip(*teams[stage], strict=True)] if len(teams[stage]) > 1 else [],
        )
        for stage, ranks in homes.items()
    }
    parts = [(stage, team) for stage, own in kinds.items() for kind in own for team in kind]
    made = groups.make_groups(seconds, [team for _, team in parts])
    groups_of: dict[int, list[dist.ProcessGroup]] = {stage: [] for stage in homes}
    for (stage, team), group in zip(parts, made, strict=True):
        if rank in team:
            groups_of[stage].append(group)
    return {
        stage: HomeGroups(
            every=own[0],
            inside=own[1],
            between=own[2] if len(own) > 2 else None,
            ranks=homes[stage],
            near=next(team for team in teams[stage] if rank in team),
        )
        for stage, own in groups_of.items()
        if own
    }


class _PendingGather(dist.Work):
    """An all-gather under way, whose error says who is missing.

    Args:
        wait: waits for it.
        is_due: whether anybody still wants it.
    """

    def __init__(self, wait: Callable[[], None], is_due: Callable[[], bool]) -> None:
        super().__init__()
        self._wait = wait
        self._is_due = is_due

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._is_due():
            self._wait()
        return True


class CopiesOfStage:
    """The copies of a stage, as one of them reaches the others through torch (``Copies``).

    Args:
        home: the groups of their processes.
        rank: this one's.
        transport: knows how long to wait.
        exchanging: what rows are exchanged for, in words.

    Attributes:
        group: of those that have the weights together.
        size: how many these are.
        index: which of them this is.
        closed: whether the groups are used no more.
    """

    def __init__(
        self,
        home: HomeGroups,
        rank: int,
        transport: Transport,
        exchanging: str = "summing gradients",
    ) -> None:
        self.group = home.inside
        self.size = len(home.near)
        self.index = home.near.index(rank)
        self.closed = False
        self._home = home
        self._others = [other for other in home.ranks if other != rank]
        self._rank = rank
        self._transport = transport
        self._exchanging = exchanging
        self._step = 0
        for group in self._groups:
            groups.lend(group, self)

    @property
    def _groups(self) -> list[dist.ProcessGroup]:
        known = (self._home.every, self._home.inside, self._home.between)
        return list({id(group): group for group in known if group is not None}.values())

    def release(self) -> None:
        """A group has been destroyed, and nobody asks it any more."""

    def close(self, *, failed: bool) -> None:
        if failed and not self.closed:
            for group in self._groups:
                groups.give_up(group)
        self.closed = True

    def gather(self, output: Tensor, own: Tensor) -> dist.Work:
        wait = self._begin_gather(output, own, "gathering the weights of a layer", self.group)
        step = self._step
        return _PendingGather(wait, lambda: step == self._step)

    def _begin_gather(
        self, output: Tensor, own: Tensor, doing: str, group: dist.ProcessGroup
    ) -> Callable[[], None]:
        if dist.get_world_size(group) == _PAIR:
            # Gloo's all-gather takes 1.7 times as long as this exchange, where both send at once.
            index, halves = dist.get_rank(group), output.chunk(_PAIR)
            halves[index].copy_(own)
            sizes = [0 if other == index else len(own) for other in range(_PAIR)]
            ask = partial(dist.all_to_all_single, halves[1 - index], own, sizes, sizes)
        else:
            # torch before 2.13 has the same by another name, which later ones warn of.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            ask = partial(gather, output, own)
        return self._asked(ask, doing, group)

    def exchange(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> None:
        self.begin_exchange(output, own, output_sizes, own_sizes)()

    def begin_exchange(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        own_sizes: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        ask = partial(dist.all_to_all_single, output, own, output_sizes, own_sizes)
        return self._asked(ask, self._exchanging, self.group)

    def sum_between(self, shard: Tensor) -> SumInParts[Tensor]:
        between = self._home.between
        if between is None:
            return shard
        # Each adds a part for all, in the order of the hosts.
        count = dist.get_world_size(between)
        length = -(-len(shard) // count)
        sent = torch.nn.functional.pad(shard, (0, count * length - len(shard)))
        received = torch.empty_like(sent)
        doing = "summing gradients between hosts"
        wait = self._asked(partial(dist.all_to_all_single, received, sent), doing, between)
        yield
        wait()
        first, *others = torch.split(received, length)
        total = first.clone()
        for term in others:
            total += term
        wait = self._begin_gather(received, total, doing, between)
        yield
        wait()
        return received[: len(shard)]

    def largest(self, numbers: Tensor) -> None:
        ask = partial(dist.all_reduce, numbers, op=dist.ReduceOp.MAX)
        self._asked(ask, "comparing which gradients there are", self._home.every)()

    def add(self, numbers: Tensor) -> None:
        ask = partial(dist.all_reduce, numbers)
        self._asked(ask, "adding the norms of gradients", self.group)()

    def take_first(self, values: Tensor) -> None:
        ask = partial(dist.broadcast, values, group_src=0)
        self._asked(ask, "taking the weights that the first copy has", self._home.every)()

    def abandon(self) -> None:
        self._step += 1

    def _asked(
        self, ask: Callable[..., Any], doing: str, group: dist.ProcessGroup
    ) -> Callable[[], None]:
        """Ask a group for something; what is given back waits for it."""
        where = f"rank {self._rank}, {doing}"
        try:
            work = ask(group=group, async_op=True)
        except RuntimeError as error:
            raise groups.lost(where, self._others, self._transport) from error
        return partial(groups.wait, work, self._transport, self._others, where)


def _refuse(place: int) -> None:
    raise RunError(
        "a gradient was added to after its layer had been summed, since the model computes "
        "otherwise than in the step before; take gathered_for='step'"
    )


class FullyShardedReducer(RowReducer):
    """Sums of the weights of a stage, of which each copy has rows.

    Args:
        shared: of one stage.
        sharded: the stages of this rank that have copies, by their numbers.

    Attributes:
        layers: of the stage.
    """

    leaves_early = True

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
        self._watch = GradientWatch(())

    @contextmanager
    def closing(self, number: int) -> Iterator[None]:
        """Within, a layer is summed as soon as it has all gradients, if copies do the same."""
        layers = self.layers
        if not layers.meets_in_order:
            yield
            return
        trained, layer_of = layers.trained(), layers.layers_trained()
        if not self._watch.watches(trained):
            self._watch = GradientWatch(trained)
        left = Counter(layer_of)

        def complete(place: int) -> None:
            left[layer_of[place]] -= 1
            if not left[layer_of[place]]:
                layers.sum_layer(layer_of[place])

        with self._watch.watching(range(len(trained)), complete, _refuse):
            yield

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
