"""``ExpertReducer``: weights of experts, whose gradients are whole where their experts are.

Tokens of all copies' microbatches have come to each expert, so nothing is summed between copies
that have different experts. Where several groups of copies have all experts each, those with the
same ones sum what theirs have learned, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor, nn

from penstock.engine.experts.divided import DividedExperts
from penstock.engine.reduce.owners import OwnerReducer
from penstock.engine.reduce.reducer import MakeReducer, Passed, Reducer, SharedWeights
from penstock.engine.reduce.rows import RowReducer
from penstock.engine.reduce.sharding import Shard
from penstock.engine.transport import Edge, Transport
from penstock.engine.weights.local_rows import PartialTensor


class ExpertGroups(NamedTuple):
    """Which copies of a stage have which of its experts: neighbours together have all of them.

    Attributes:
        everyone: the ranks of all copies, ascending.
        size: how many of them divide the experts.
    """

    everyone: tuple[int, ...]
    size: int

    @property
    def all(self) -> list[tuple[int, ...]]:
        """The ranks of each group that together has all experts; behind them, if they are several,
        everyone."""
        starts = range(0, len(self.everyone), self.size)
        parts = [self.everyone[start : start + self.size] for start in starts]
        return parts if len(parts) == 1 else [*parts, self.everyone]

    def with_all(self, rank: int) -> tuple[int, ...]:
        """The ranks that together with this one have all experts."""
        return next(own for own in self.all if rank in own)

    def with_same(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same experts as this one, itself included."""
        return self.everyone[self.everyone.index(rank) % self.size :: self.size]


class StageExperts(NamedTuple):
    """The experts of one of a rank's stages, and who else has the same.

    Attributes:
        divided: what this rank has of them.
        ranks: those that have the same experts, this one among them, ascending.
    """

    divided: DividedExperts
    ranks: tuple[int, ...]


class ExpertReducer(RowReducer):
    """The sums of a stage's experts, of which each copy has some.

    Args:
        shared: their weights.
        experts: by stage.

    Attributes:
        ranks: of all copies of the stage.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedWeights,
        transport: Transport,
        experts: Mapping[int, StageExperts],
    ) -> None:
        (self.stage,) = shared.stages
        self.ranks = shared.ranks
        own = experts[self.stage]
        self._divided = own.divided
        weights = own.divided.weights
        self.shards = {
            weight.whole: Shard(weight.start, weight.rows if weight.is_here else None)
            for weight in weights
        }
        self._rows = {weight.whole: weight.rows for weight in weights}
        self._among: OwnerReducer | None = None
        if len(own.ranks) > 1:
            rows = tuple(weight.rows for weight in weights if weight.is_here)
            same = shared._replace(ranks=own.ranks, parameters=rows)
            self._among = OwnerReducer(rank, same, transport)

    def closing(self, number: int) -> AbstractContextManager[None]:
        return nullcontext() if self._among is None else self._among.closing(number)

    def hand_in(self, number: int, num_gathered: int) -> None:
        if self._among is not None:
            self._among.hand_in(number, num_gathered)

    def advance(self, *, averages: bool) -> None:
        if self._among is not None:
            self._among.advance(averages=averages)

    def finish(self) -> None:
        if self._among is not None:
            self._among.finish()

    def take_passed(self) -> list[Passed]:
        return [] if self._among is None else self._among.take_passed()

    def rows_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        return self._rows.get(parameter)

    def norms(self) -> dict[nn.Parameter, Tensor]:
        return dict(zip(self._rows, self._divided.norms(), strict=True))

    def drop(self) -> None:
        for rows in self._rows.values():
            rows.grad = None

    def close(self, *, failed: bool) -> None:
        self._divided.close(failed=failed)
        if self._among is not None:
            self._among.close(failed=failed)

    def outgoing(self) -> set[Edge]:
        return set() if self._among is None else self._among.outgoing()


def with_experts(
    rank: int,
    shared: SharedWeights,
    transport: Transport,
    others: MakeReducer,
    experts: Mapping[int, StageExperts],
) -> Reducer:
    """The reducer of some shared weights: of experts that copies have divided, or what ``others``
    makes."""
    if shared.parameters and isinstance(shared.parameters[0], PartialTensor):
        return ExpertReducer(rank, shared, transport, experts)
    return others(rank, shared, transport)
