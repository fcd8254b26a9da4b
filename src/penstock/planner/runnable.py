"""Which schedules the runtime can perform today; all can be checked, simulated and drawn."""

from __future__ import annotations

from penstock.schedule import Schedule


def obstacle(schedule: Schedule) -> str:
    """Why the runtime cannot perform ``schedule`` yet; empty if it can."""
    if schedule.num_slices > 1:
        return f"it cuts microbatches into {schedule.num_slices} slices"
    return ""
