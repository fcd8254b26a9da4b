"""What is written on a span, the same in every kind of picture."""

from __future__ import annotations

from penstock.schedule.op import Kind, Op
from penstock.timeline import Timeline

_SHORT = {Kind.UPDATE: "U"}


def label(timeline: Timeline, op: Op, rank: int) -> str:
    """Kind and microbatch, as in ``F0``; where a rank holds several stages, its own letter for
    the stage behind it, as in ``F0b``."""
    if op.kind is Kind.UPDATE:
        return _SHORT[op.kind]
    stages = timeline.stages_of[rank]
    suffix = chr(ord("a") + stages.index(op.stage) % 26) if len(stages) > 1 else ""
    return f"{op.kind.value}{op.microbatch}{suffix}"


def headline(timeline: Timeline) -> str:
    """One line of facts: name, source, makespan and both bubbles."""
    return (
        f"{timeline.name or 'schedule'}, {timeline.source}: makespan {timeline.makespan:.4g}, "
        f"bubble {timeline.bubble:.1%}, stage bubble {timeline.stage_bubble:.1%}"
    )
