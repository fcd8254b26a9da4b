"""``ExpertPart``: the experts of a mixture in a layer, which copies of a stage can divide."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.values import MOST_BYTES, Value, number, whole


class ExpertPart(Value, frozen=True, kw_only=True):
    """The experts of one mixture. Bytes and shares are those of one device that has all of them.

    Attributes:
        name: of their module in the model.
        num_experts: how many there are.
        parameter_bytes: of the weights of all of them.
        token_bytes: of what one microbatch hands to them, each token once for each of its experts;
            they give as much back.
        share: of the layer's forwards and backwards, what they take.
        fewer: their forward and backward with half, a quarter, … of them and as many tokens, as a
            share of that with all; below the last one it takes as long as there, and without any,
            as long as with all.
        loads: the share of tokens that each expert got when it was measured; none, and all get as
            many.
    """

    name: str
    num_experts: int
    parameter_bytes: int = 0
    token_bytes: int = 0
    share: float = 0.0
    fewer: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.check_fields("experts")
        whole("experts: num_experts", self.num_experts, 1, MOST_BYTES)
        if not 0 <= self.share <= 1:
            raise InputError(f"experts: share is {self.share}, but must be 0 to 1")
        for share in self.fewer:
            number("experts: fewer", share)
        for load in self.loads:
            number("experts: loads", load)
        if self.loads and len(self.loads) != self.num_experts:
            raise InputError(
                f"experts: loads has {len(self.loads)} shares of {self.num_experts} experts; give "
                "one for each, or none"
            )

    def renamed(self, text: Callable[[str], str]) -> ExpertPart:
        """The experts of a layer whose modules have other names."""
        return replace(self, name=text(self.name))

    def refusal(self, num_ranks: int) -> str:
        """Why so many copies cannot divide them, in words; empty if they can."""
        return f"it has {self.num_experts} experts" if self.num_experts % num_ranks else ""

    def rank_loads(self, num_ranks: int) -> tuple[float, ...]:
        """The share of tokens that come to each of so many copies that divide them evenly.

        >>> ExpertPart(name="e", num_experts=4, loads=(0.4, 0.3, 0.2, 0.1)).rank_loads(2)
        (0.7, 0.3)
        """
        each = self.num_experts // num_ranks
        loads = self.loads or (1 / self.num_experts,) * self.num_experts
        return tuple(
            round(sum(loads[rank * each : (rank + 1) * each]), 12) for rank in range(num_ranks)
        )

    def pace(self, num_ranks: int) -> float:
        """How many times as long the busiest of so many copies that divide them takes as one that
        has all of them and its own tokens.

        >>> ExpertPart(name="e", num_experts=4, fewer=(0.75, 0.625)).pace(2)
        0.75
        """
        halvings = min(num_ranks.bit_length() - 1, len(self.fewer))
        return self.imbalance(num_ranks) * (self.fewer[halvings - 1] if halvings else 1.0)

    def imbalance(self, num_ranks: int) -> float:
        """How many times as many tokens as with even loads come to the busiest of so many
        copies."""
        return max(self.rank_loads(num_ranks)) * num_ranks
