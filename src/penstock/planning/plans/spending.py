"""What a step of a plan costs, where its devices have a price, and for how many tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from penstock.base.units import four_digits
from penstock.core.graph import LayerGraph

if TYPE_CHECKING:
    from penstock.planning.plans.plan import Plan

_TOKENS = re.compile(r"\((\d+), (\d+)\) int(?:32|64)")
"""The input of a model of language: rows of numbers of words."""

_HOUR = 3600.0


class Spending(NamedTuple):
    """What a step takes of devices.

    Attributes:
        amount: for a step; money where all devices have a price, else hours of one device.
        tokens: of a step; 0 where rows are no tokens, as far as anybody knows.
        in_money: whether ``amount`` is money, of the currency in which prices are.
    """

    amount: float
    tokens: int = 0
    in_money: bool = True

    @classmethod
    def of(
        cls, seconds: float, num_devices: int, price_per_hour: float, tokens: int = 0
    ) -> Spending:
        """That of some devices for so many seconds; in hours of devices where they have no price.

        Args:
            price_per_hour: of all of them together; 0 where nobody says.
        """
        rate = price_per_hour or float(num_devices)
        return cls(seconds * rate / _HOUR, tokens, price_per_hour > 0)

    def __str__(self) -> str:
        unit = "" if self.in_money else " device-hours"
        words = f"{four_digits(self.amount)}{unit} a step"
        if self.tokens:
            words += f", {four_digits(self.amount / self.tokens * 1e9)} per billion tokens"
        return words


def tokens_of_input(input_shape: str) -> int:
    """How many tokens a microbatch has whose first layer reads this.

    >>> tokens_of_input("(2, 16) int64"), tokens_of_input("(2, 16) float32")
    (32, 0)
    """
    match = _TOKENS.match(input_shape)
    return int(match[1]) * int(match[2]) if match else 0


def tokens_of_graph(graph: LayerGraph) -> int:
    """How many tokens a microbatch of the profiled size has; 0 where rows are no tokens."""
    return tokens_of_input(graph.layers[0].input_shape)


def spending_of(plan: Plan) -> Spending:
    """What a step of a plan takes of its devices."""
    first = plan.input_shapes.get(plan.stages[0].layers[0], "")
    prices = [device.price_per_hour for device in plan.devices]
    price = sum(prices) if prices and min(prices) > 0 else 0.0
    tokens = plan.num_microbatches * tokens_of_input(first)
    return Spending.of(plan.step_seconds, plan.num_seats, price, tokens)
