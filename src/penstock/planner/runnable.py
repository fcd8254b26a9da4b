"""Which schedules the runtime can perform today; all can be checked, simulated and drawn."""

from __future__ import annotations

from penstock.schedule import Kind, Schedule
from penstock.schedule.op import COMPUTE

PERFORMED = frozenset({Kind.FORWARD, Kind.BACKWARD})
"""The compute ops that the runtime performs."""


def obstacle(schedule: Schedule) -> str:
    """Why the runtime cannot perform ``schedule`` yet; empty if it can."""
    unknown = {op.kind for op in schedule.where if op.kind in COMPUTE} - PERFORMED
    if unknown:
        return f"it has ops of kind {', '.join(sorted(unknown))}"
    if schedule.num_slices > 1:
        return f"it cuts microbatches into {schedule.num_slices} slices"
    if schedule.weight_copies > 1:
        return f"it keeps {schedule.weight_copies} copies of a stage's weights"
    return ""
