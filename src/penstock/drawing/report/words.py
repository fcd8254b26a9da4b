"""Where a measured step parts from its prediction, in words."""

from __future__ import annotations

from penstock.base.units import picture_seconds
from penstock.core.timing import TOLERANCE, Cause, Parting


def departure(parting: Parting | None) -> str:
    """How the first op that departs does so, in one sentence."""
    if parting is None:
        share = f"{TOLERANCE:.0%}"
        return f"No op departs from the prediction by more than {share} of the step and the noise."
    op, rank = parting.measured.op, parting.measured.rank
    return f"The first op to depart from the prediction is {op} on rank {rank}: {reason(parting)}."


def reason(parting: Parting) -> str:
    """What was otherwise about the op, and what made it so."""
    cause = parting.cause
    if cause.op == parting.measured.op and cause.what != "pause":
        return f"it {_what(cause)}"
    start = _instead_of(parting.measured.start, parting.predicted.start)
    most = abs(cause.excess) > 0.6 * abs(parting.start_excess)
    because = "because" if most else "for several reasons, the largest that"
    return f"it started at {start}, {because} {cause.op} on rank {cause.rank} {_what(cause)}"


def _what(cause: Cause) -> str:
    lengths = (
        f"{picture_seconds(max(cause.measured, 0.0))} instead of {picture_seconds(cause.predicted)}"
    )
    if cause.what == "op":
        return f"took {lengths}"
    if cause.after is None:
        return f"began the rank's work at {lengths}"
    where = "" if cause.after_rank == cause.rank else f" of rank {cause.after_rank}"
    return f"followed {cause.after}{where} after {lengths}"


def _instead_of(measured: float, predicted: float) -> str:
    return f"{picture_seconds(measured)} instead of {picture_seconds(predicted)}"
