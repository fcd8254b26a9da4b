"""``Alternative``: a plan that was weighed, as a row of the table that tells why."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.telling import WARNING, wrap_to
from penstock.base.units import format_bytes, format_seconds
from penstock.base.values import Value, shown
from penstock.core.graph import Contention
from penstock.planning.plans.table import WIDTH, as_text, new_table

_WITH_REMARKS = 100
"""Columns of a table that has a column for remarks."""


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
    contention: Contention | None,
    warnings: Sequence[str],
    width: int,
) -> str:
    """A plan as text with why it was chosen and how sure that is, a paragraph each.

    Args:
        sheet: the plan as text.
        rows: what was weighed.
        contention: what ranks of one machine were taken to cost each other; ``None`` to leave that
            out.
        warnings: what makes the choice doubtful.
        width: of the longest line, in columns.
    """
    paragraphs = (
        sheet,
        comparison(rows, width) if rows else "",
        wrap_to(reason, width),
        wrap_to(f"measured: {contention}", width) if contention and contention.num_ranks else "",
        "\n".join(wrap_to(warning, width, WARNING) for warning in warnings),
    )
    return "\n\n".join(filter(None, paragraphs))


def comparison(rows: Sequence[Alternative], width: int = WIDTH) -> str:
    """Plans side by side, as text without colour codes; below each what is remarked of it, where
    lines of ``width`` columns have no room for that behind it."""
    apart = width < _WITH_REMARKS
    table = new_table()
    for name in ("", "plan", "step", "bubble", "memory", "moved", "delay"):
        text = name in ("", "plan")
        table.add_column(name, justify="left" if text else "right", no_wrap=not text)
    if not apart:
        table.add_column("", justify="right")
    for row in rows:
        remark = f"\n({row.remark})" if row.remark and apart else ""
        table.add_row(
            row.label,
            f"{row.description}{remark}",
            format_seconds(row.step_seconds),
            f"{row.bubble:.0%}",
            format_bytes(row.memory_bytes),
            format_bytes(row.moved_bytes),
            f"{row.delay:g}",
            *([] if apart else [row.remark]),
        )
    return as_text(table, width)
