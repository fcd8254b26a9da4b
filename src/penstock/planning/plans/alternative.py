"""``Alternative``: a plan that was weighed, as a row of the table that tells why."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.units import format_bytes, format_seconds
from penstock.base.values import Value, shown
from penstock.core.graph import Contention
from penstock.planning.plans.table import as_text, new_table


class Alternative(Value, frozen=True, kw_only=True):
    """A plan that was weighed.

    Attributes:
        label: what it is the best of, for example ``"data parallel"``.
        description: schedule, stages, replicas.
        step_seconds: of a minibatch; without a flush, in the steady state.
        bubble: idle rank-time over all rank-time of a step.
        memory_bytes: of the rank that needs most.
        moved_bytes: over all links, per minibatch.
        delay: updates between the version of the weights that a gradient is computed with and the
            one that it is applied to, of the stage that waits longest; 0 in a synchronous plan.
        remark: for example why it was not chosen.
    """

    label: str
    description: str
    step_seconds: float
    bubble: float = 0.0
    memory_bytes: int = 0
    moved_bytes: int = 0
    delay: float = 0.0
    remark: str = ""

    def __post_init__(self) -> None:
        self.check_fields(f"alternative {shown(self.label)}")


def argued(
    sheet: str,
    rows: Sequence[Alternative],
    reason: str,
    contention: Contention,
    warnings: Sequence[str],
) -> str:
    """A plan as text with why it was chosen and how sure that is, a paragraph each.

    Args:
        sheet: the plan as text.
        rows: what was weighed.
        contention: what ranks of one machine were taken to cost each other.
        warnings: what makes the choice doubtful.
    """
    paragraphs = (
        sheet,
        comparison(rows) if rows else "",
        reason,
        f"measured: {contention}" if contention.num_ranks else "",
        "\n".join(f"! {warning}" for warning in warnings),
    )
    return "\n\n".join(filter(None, paragraphs))


def comparison(rows: Sequence[Alternative]) -> str:
    """Plans side by side, as text without colour codes."""
    table = new_table()
    for name in ("", "plan", "step", "bubble", "memory", "moved", "delay", ""):
        table.add_column(name, justify="left" if name in ("", "plan") else "right")
    for row in rows:
        table.add_row(
            row.label,
            row.description,
            format_seconds(row.step_seconds),
            f"{row.bubble:.0%}",
            format_bytes(row.memory_bytes),
            format_bytes(row.moved_bytes),
            f"{row.delay:g}",
            row.remark,
        )
    return as_text(table)
