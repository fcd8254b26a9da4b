"""Schedules: ops, their one dependency rule, the proof that they run, passes, and families."""

from penstock.schedule.op import Kind, Op
from penstock.schedule.schedule import Schedule

__all__ = ["Kind", "Op", "Schedule"]
