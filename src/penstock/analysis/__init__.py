"""What a timeline tells: where its idle time comes from, what its ops cost, and where a measured
one parts from its prediction."""

from penstock.analysis.idle import Idle, idle_of
from penstock.analysis.measured import measured_costs
from penstock.analysis.parting import TOLERANCE, Cause, Parting, find_parting

__all__ = [
    "TOLERANCE",
    "Cause",
    "Idle",
    "Parting",
    "find_parting",
    "idle_of",
    "measured_costs",
]
