"""``ShardedReducer``: who owns rows keeps their sum, and updates them for all holders.

Owners are the holders themselves, or parameter servers: ranks that do nothing else.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv
1910.02054, section 5.1: with r holders, each has 1/r of the optimizer's state. The bytes are those
of a sum that all get, since weights travel in place of sums:

1. Holders hand in, and owners sum, as ``owners`` describes. What a holder owns is whole rows of
   parameters, so that the optimizer's state is in rows, too, which a checkpoint can put together.
2. The optimizer of a holder has, in the place of each parameter, the rows of it that the holder
   owns: a parameter that shares its memory (``Shards``). Its gradient is the sum of these rows.
3. When a stage has stepped, its rank sends its rows to the other holders, those that the next
   forward needs first before the others. It takes theirs when it is about to read the stage's
   weights: at the latest when a step, or a loop of steps, is over. What it hands on to others in
   the tree of holders, it does so as soon as all of its stages have stepped.

Where gradients must be known as a whole, to clip them, 1 hands the sums to all first, which is half
as much again to send.

Parameter servers (Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
OSDI'14) own all rows, and the others none: these send M bytes, and take M, and have no optimizer
state. Who runs no stage has time and memory for a step, and nobody waits for its backward. Where an
optimizer needs no gradients but a parameter's own, a server steps and answers bucket by bucket
(``update_in_turn``): gradients come while weights go, and links are busy in both directions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, RunError
from penstock.core.summation.tree import SumTree
from penstock.engine.masters import take_gradient_dtype
from penstock.engine.reduce.buckets import Bucket, ParameterRange, row_buckets_of
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import Purpose, ServedGradients, SharedWeights
from penstock.engine.transport import Edge, Transport

_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own that treat each number by itself."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE


def steps_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether several steps, each with the gradients of some parameters, make what one step with
    all gradients makes: of torch's own optimizers that treat each number by itself, which count
    steps for each parameter, unless somebody has hooks that would see more steps than there are."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return _is_known(optimizer) and not hooks


class Shard(NamedTuple):
    """The rows of a parameter that one holder owns.

    Attributes:
        start: the first row.
        part: the rows, in the memory of the whole parameter; ``None`` if there are none.
    """

    start: int
    part: nn.Parameter | None

    @property
    def stop(self) -> int:
        """The row behind the last one."""
        if self.part is None:
            return self.start
        return self.start + (self.part.shape[0] if self.part.dim() else 1)


class Shards:
    """The rows that one rank owns of the parameters that it shares.

    Args:
        shards: by the whole parameter.

    Attributes:
        of: as given.
    """

    def __init__(self, shards: Mapping[nn.Parameter, Shard]) -> None:
        self.of = dict(shards)
        self._groups: dict[torch.optim.Optimizer, list[list[nn.Parameter]]] = {}

    def put_into(self, optimizer: torch.optim.Optimizer, whose: str) -> None:
        """Let an optimizer have the rows that the rank owns, in the place of whole parameters.

        Raises:
            InputError: its step needs more of a parameter than the numbers that it changes.
        """
        if not any(
            parameter in self.of
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            return
        kind = type(optimizer)
        alone = getattr(kind, "elementwise", None)
        if not (_is_known(optimizer) if alone is None else alone) or optimizer.state:
            raise InputError(
                f"{kind.__name__}, the optimizer of {whose}, may need whole parameters to step, "
                "and with this reducer a rank has rows of them; take reducer='owners', one of "
                f"{', '.join(sorted(_ELEMENTWISE))}, or say elementwise = True in its class"
            )
        self._groups[optimizer] = self.groups_of(optimizer)
        for whole, (_, part) in self.of.items():
            if part is not None:
                take_gradient_dtype(part, whole)
        for group in optimizer.param_groups:
            own = (
                self.of.get(parameter, Shard(0, parameter)).part for parameter in group["params"]
            )
            group["params"] = [part for part in own if part is not None]

    def groups_of(self, optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
        """The whole parameters of each of an optimizer's groups, those included of which only
        others have rows: its options are theirs all the same."""
        now = [list(group["params"]) for group in optimizer.param_groups]
        return self._groups.get(optimizer, now)

    def lend(self) -> None:
        """Give rows the gradients of their whole parameters, where these have some."""
        for whole, (start, part) in self.of.items():
            if part is not None and whole.grad is not None:
                part.grad = _rows(whole.grad.detach(), start, part)

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget the gradients of those of some parameters that are shared in rows."""
        for whole in parameters if self.of else ():
            if whole in self.of:
                whole.grad = None
                if (part := self.of[whole].part) is not None:
                    part.grad = None


def _rows(whole: Tensor, start: int, part: Tensor) -> Tensor:
    return whole[start : start + part.shape[0]] if part.dim() else whole


def _row_size(whole: Tensor) -> int:
    """How many numbers a row has; of one number without dimensions, that."""
    return max(whole[0].numel(), 1) if whole.dim() else 1


def _owned_rows(whole: Tensor, start: int, stop: int) -> Tensor:
    """The rows, in the memory of the whole, that some of its numbers make."""
    size = _row_size(whole)
    return whole[start // size : stop // size] if whole.dim() else whole


class ShardedReducer(OwnerReducer):
    """Sums by owners who also update, for one group of shared weights.

    Args:
        rank: the holder.
        transport: the holder's end of its channels.
        most_buckets, servers, tree: see ``OwnerReducer``.

    Attributes:
        shards: what this rank owns, by the whole parameter.
        hands_sums_to_all: whether every holder gets all sums.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        most_buckets: int = 1,
        servers: Collection[int] = (),
        tree: SumTree | None = None,
    ) -> None:
        super().__init__(rank, shared, transport, most_buckets, servers, tree)
        self.hands_sums_to_all = False
        self._handed_in = 0.0
        self._served: list[ServedGradients] = []
        self._of_rows = row_buckets_of(shared.parameters, self._tree.weights, most_buckets)
        self.shards = {parameter: Shard(0, None) for parameter in shared.parameters}
        for place, start, stop in self._ranges_of(rank):
            whole = shared.parameters[place]
            rows = _owned_rows(whole.detach(), start, stop)
            part = nn.Parameter(rows, requires_grad=whole.requires_grad)
            self.shards[whole] = Shard(start // _row_size(whole), part)

    def _ranges_of(self, rank: int) -> list[ParameterRange]:
        return [own for bucket in self._of_rows for own in bucket.ranges_of(rank)]

    def _buckets_without(self, frozen: tuple[int, ...]) -> tuple[Bucket, ...]:
        return self._of_rows  # who owns what never changes, since the optimizer's state is there

    @property
    def _shares_sums(self) -> bool:
        return self.hands_sums_to_all

    def finish(self) -> None:
        if self.hands_sums_to_all:
            super().finish()
            return
        self._handed_in = min(self._now.left.values())
        for index in range(len(self._now.buckets)):
            if not self._has_servers:
                self._note(index)
            sums = self._now.final(index).sums.get(self._rank, ())
            for value in sums:
                if value is not None:
                    self._divide(value)
            self._give_rows(index, sums)
        for parameter in self._shared.parameters:
            parameter.grad = None
        self._round = None

    def _give_rows(self, index: int, sums: Iterable[Tensor | None]) -> None:
        """Make sums the gradients of the rows of a bucket that this rank owns."""
        parts = self._parts_in(index)
        for part, value in zip(parts, sums, strict=True):
            part.grad = None if value is None else value.view_as(part)

    def _parts_in(self, index: int) -> list[nn.Parameter]:
        """The rows of a bucket that this rank owns."""
        places = [own.place for own in self._of_rows[index].ranges_of(self._rank)]
        parts = [self.shards[self._shared.parameters[place]].part for place in places]
        return [part for part in parts if part is not None]

    @property
    def serves(self) -> bool:
        """Whether this rank is a parameter server to which gradients come in several buckets, of
        which it needs to know no others before it steps one."""
        return self._rank not in self._givers and self.leaves_early and not self._shares_sums

    def update_in_turn(self, step: Callable[[], None]) -> None:
        """As a server: step and answer bucket by bucket, in the order in which backwards make them.

        Args:
            step: steps all rows that have a gradient.

        Raises:
            RunError: a gradient was added to after it had left.
        """
        round_ = self._now
        for index in self._in_turn:
            passing = round_.under_way[index]
            while passing.stage < self._num_stages(passing):
                self._go_on(passing)
            if round_.again:
                raise RunError(
                    "a gradient was added to after it had left for a parameter server, since the "
                    "model computes otherwise than in the step before; plan with reducer='owners'"
                )
            self._give_rows(index, passing.sums.pop(self._rank))
            step()
            for part in self._parts_in(index):
                part.grad = None
            self._hand_back(index, round_.number)
        self._round = None

    @property
    def tag(self) -> int:
        """Which group of weights it is; holders have the same order of groups."""
        return self._shared.tag

    @property
    def stages(self) -> frozenset[int]:
        """Those of this rank whose weights these are."""
        return self._shared.stages

    @cached_property
    def _relayed_levels(self) -> range:
        """The levels from which rows come that this rank hands on, from the outermost one."""
        role = self._role
        levels = [level for level in range(role.num_levels) if role.targets[level]]
        below = [level for level in range(role.num_levels) if role.sources[level]]
        if self._rank not in self._givers or not levels:
            return range(0)
        return range(levels[-1], min(below, default=role.num_levels), -1)

    def hand_back(self, number: int) -> None:
        """Send the rows that this rank has updated to all who get nothing but these from it; waits
        for nobody."""
        for index in self._in_turn:
            self._hand_back(index, number)

    def _hand_back(self, index: int, number: int) -> None:
        highest = max(self._relayed_levels, default=0)
        for level in reversed(range(highest, self._role.num_levels)):
            self._send_rows(level, index, number)

    @torch.no_grad()
    def relay(self, number: int) -> None:
        """Hand on rows that others have updated, with this rank's, to those who get them from it.
        May wait until all have handed back theirs, or relay, too: all ranks call it for groups in
        the same order."""
        for level in self._relayed_levels:
            for index in self._in_turn:
                self._take_rows(level, index, number)
                self._send_rows(level - 1, index, number)

    @torch.no_grad()
    def take_back(self, number: int) -> None:
        """Wait for the rows that others have updated, but for those that were handed on."""
        if self._rank not in self._givers:
            return
        # All others send in the same order: none of them is waited for while another's lie here.
        for index in self._in_turn:
            for level in reversed(range(self._role.num_levels)):
                if level not in self._relayed_levels:
                    self._take_rows(level, index, number)

    @property
    def _in_turn(self) -> Iterable[int]:
        """The buckets, those of the first layers first: backwards make the last ones first, and
        forwards need them last. Servers answer in the order in which they get them."""
        places = range(len(self._of_rows))
        return places if self._has_servers else reversed(places)

    def _rows_in(self, index: int, owners: Iterable[int]) -> list[ParameterRange]:
        """The rows of a bucket that some holders own."""
        return [own for owner in owners for own in self._of_rows[index].ranges_of(owner)]

    def _send_rows(self, level: int, index: int, number: int) -> None:
        for source, owners in self._role.sources[level].items():
            ranges = self._rows_in(index, owners)
            if ranges and source in self._givers:  # other servers compute nothing with them
                edge = self._shared.edge(self._rank, source, Purpose.WEIGHTS, index)
                self._transport.send(edge, number, self._values_of(ranges))

    def _take_rows(self, level: int, index: int, number: int) -> None:
        for target, owners in self._role.targets[level].items():
            if ranges := self._rows_in(index, owners):
                edge = self._shared.edge(target, self._rank, Purpose.WEIGHTS, index)
                waiting = (
                    f"rank {self._rank}, waiting for weights that rank {owners[0]} has updated"
                )
                self._put_rows(ranges, self._transport.recv(edge, number, waiting))
                for owner in owners:
                    self._note_served(owner)

    def _values_of(self, ranges: Iterable[ParameterRange]) -> list[Tensor]:
        """Weights as they are, in their own memory."""
        return [
            self._shared.parameters[place].detach().reshape(-1)[start:stop]
            for place, start, stop in ranges
        ]

    def _put_rows(self, ranges: Iterable[ParameterRange], values: Iterable[Tensor]) -> None:
        """Make values that their owner has updated this rank's weights."""
        for (place, start, stop), value in zip(ranges, values, strict=True):
            rows = _owned_rows(self._shared.parameters[place], start, stop)
            rows.copy_(value.view(rows.shape))

    def _note_served(self, owner: int) -> None:
        """Weights have come from their owner."""
        if owner not in self._givers:
            server = self._tree.owners.index(owner)
            self._served.append(ServedGradients(server, self._handed_in, time.perf_counter()))

    def take_served(self) -> list[ServedGradients]:
        served, self._served = self._served, []
        return served

    def outgoing(self) -> set[Edge]:
        others = self._shared.others(self._rank)
        return super().outgoing() | {
            self._shared.edge(self._rank, other, Purpose.WEIGHTS, index)
            for other in others
            for index in range(len(self._of_rows))
        }
