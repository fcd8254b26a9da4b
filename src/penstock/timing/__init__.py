"""When ops run: what they cost, a simulator that says when each would run, and what that tells.

``costs`` are the durations of ops and messages; ``simulator`` turns a schedule and costs into a
``timeline``; of a timeline, ``idle`` says where its gaps come from, ``measured`` what its ops cost,
and ``parting`` where it departs from its prediction.
"""

from penstock.timing.idle import Idle, idle_of
from penstock.timing.measured import measured_costs
from penstock.timing.parting import TOLERANCE, Cause, Parting, find_parting

__all__ = [
    "TOLERANCE",
    "Cause",
    "Idle",
    "Parting",
    "find_parting",
    "idle_of",
    "measured_costs",
]
