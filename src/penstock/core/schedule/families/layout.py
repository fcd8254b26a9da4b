"""How the orders of ranks become a schedule: small ones op by op, large ones as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.core.schedule.op import Op
from penstock.core.schedule.schedule import MANY_OPS, Activations, Schedule

if TYPE_CHECKING:
    from penstock.core.schedule.columns.columns import Fields


class Order(Protocol):
    """The ops of a rank, in their order, before they are made."""

    def __len__(self) -> int:
        """How many ops there are."""

    def ops(self) -> Sequence[Op]:
        """The ops themselves."""

    def fields(self) -> Fields:
        """The same as columns."""


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
    orders = tuple(ranks)
    if sum(map(len, orders)) >= MANY_OPS:
        from penstock.core.schedule.families.in_columns import columns_of

        return Schedule.of_columns(columns_of(orders, num_microbatches), name, activations)
    rows = (order.ops() for order in orders)
    if num_microbatches is not None:
        rows = ([op for op in ops if op.microbatch < num_microbatches] for ops in rows)
    return Schedule.of(rows, name, activations)
