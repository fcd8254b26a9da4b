"""How the orders of ranks become a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from penstock.core.schedule.columns.columns import Columns, Fields
from penstock.core.schedule.schedule import Activations, Schedule


class Order(Protocol):
    """The ops of a rank, in their order, before they are made."""

    def fields(self) -> Fields:
        """The ops as columns."""


def laid_out(
    ranks: Iterable[Order],
    name: str,
    num_microbatches: int | None = None,
    activations: Activations = "own",
) -> Schedule:
    """The schedule of some orders.

    Args:
        ranks: one order each.
        name: of the family.
        num_microbatches: leave out what is for later ones.
        activations: which of them backwards go through.
    """
    columns = Columns.of_fields([order.fields() for order in ranks])
    if num_microbatches is not None:
        columns = columns.only(columns.microbatch < num_microbatches)
    return Schedule.of_columns(columns, name, activations)
