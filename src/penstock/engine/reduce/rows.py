"""``RowReducer``: sums of weights of which each holder has rows only, for good."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from penstock.engine.reduce.reducer import Reducer
from penstock.engine.reduce.sharding import Shard


class RowReducer(Reducer):
    """The sums of weights of one stage, of which each copy has rows.

    Attributes:
        stage: whose weights these are.
        shards: what this copy has, by the whole parameter.
    """

    begins_equal = True
    stage: int
    shards: Mapping[nn.Parameter, Shard]

    @abstractmethod
    def rows_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Those that are here, if the parameter is one of these."""

    @abstractmethod
    def norms(self) -> dict[nn.Parameter, Tensor]:
        """The norms of whole gradients, by the whole parameter; without those that no copy has. All
        copies call it."""

    def gather(self, num_microbatches: int) -> None:
        """A minibatch of so many microbatches begins."""

    @abstractmethod
    def drop(self) -> None:
        """Forget what a failed round has left."""
