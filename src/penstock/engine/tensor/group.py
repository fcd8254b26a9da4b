"""What the members of a group do together.

All of it is one exchange: every member hands a tensor to every other one, and gets one from each.
A ring would send as many bytes; by direct messages a member waits once instead of t−1 times.

With t members and a value of V bytes a member sends (t−1)/t · V in a gather, a reduce-scatter and
an all-to-all of rows and features less by another t, and 2(t−1)/t · V in an all-reduce: what
``docs/tensor-parallelism.md`` says that a ring sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.tensor.memory_order import dense_copy, joined, memory_order
from penstock.engine.tensor.parts import bounds, sizes


class Group(ABC):
    """One member's end of its group. Every member calls the same methods in the same order.

    Attributes:
        index: this member's coordinate, from 0.
        size: how many members there are.
    """

    index: int
    size: int

    @abstractmethod
    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Hand ``parts[j]`` to member j, and take what each member has for this one.

        Args:
            parts: as many as there are members. They may be overwritten as soon as this returns.

        Returns:
            In the order of the members; this one's own part is given back as it is. Those of others
            belong to the caller.

        Raises:
            PeerError, DeadlineError: a member failed, or did not come.
        """

    @abstractmethod
    def tell(self, number: int) -> list[int]:
        """What every member tells, in the order of the members; no device has to be waited for.

        Raises:
            PeerError, DeadlineError: a member failed, or did not come.
        """

    def gather(self, part: Tensor, dim: int) -> tuple[Tensor, list[int]]:
        """The whole of which every member has a part, and how much each has along ``dim``."""
        parts = self.exchange([part] * self.size)
        return joined(parts, dim), [there.shape[dim] for there in parts]

    def reduce_scatter(
        self, value: Tensor, dim: int, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """This member's part of the sum of all members' values.

        Args:
            value: of the same shape everywhere.
            dim: along which the sum is divided.
            lengths: of the parts; by default those of ``bounds``.
        """
        lengths = sizes(value.shape[dim], self.size) if lengths is None else list(lengths)
        return _summed(self.exchange(torch.split(value, lengths, dim)), memory_order(value))

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum of all members' values, with the same bits on all of them."""
        flat = value.reshape(-1)
        part = self.reduce_scatter(flat, 0)
        whole, _ = self.gather(part, 0)
        # Nobody else has this memory; a view of it could not be overwritten behind a custom node.
        total: Tensor = torch.ops.aten._unsafe_view(whole, value.shape)
        order = memory_order(value)
        return total if order == memory_order(total) else dense_copy(total, order)

    def all_to_all(
        self, part: Tensor, have: int, want: int, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        """From a part along one dimension to a part along another.

        Args:
            have: the dimension along which ``part`` is divided.
            want: the one along which the result is.
            lengths: of the parts of the result; by default those of ``bounds``.

        Returns:
            The part, and how much each member had along ``have``.
        """
        lengths = sizes(part.shape[want], self.size) if lengths is None else list(lengths)
        parts = self.exchange(torch.split(part, lengths, want))
        return joined(parts, have), [there.shape[have] for there in parts]

    def part(self, value: Tensor, dim: int) -> Tensor:
        """This member's part of a value that all have; a tensor of its own."""
        own = bounds(value.shape[dim], self.size, self.index)
        return dense_copy(value.narrow(dim, own.start, own.length), memory_order(value))

    def of_first(self, value: Tensor) -> Tensor:
        """The first member's value, of the same shape everywhere."""
        if self.index == 0:
            self.exchange([value] * self.size)
            return value
        nothing = value.new_empty(0)
        return self.exchange([nothing] * self.size)[0]

    def largest(self, value: Tensor) -> Tensor:
        """Entry by entry, the largest of all members' values."""
        return torch.stack(self.exchange([value] * self.size)).amax(0)


def _summed(terms: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """In the order of the members, so that whoever adds gets the same bits; in memory, dimensions
    lie in another given order."""
    total = dense_copy(terms[0], order)
    for term in terms[1:]:
        total += term
    return total
