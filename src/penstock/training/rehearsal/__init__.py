"""Rehearsing a plan on emulated devices: real processes, real messages, compute that is a wait.

Decisions:

A rehearsal forks from a process of its own, because only one without threads can be forked safely,
and whoever asks may have many. A rank is a real worker whose stages and optimizers wait. Ops wait
from when they start; waiting until the time an op should end would be exact by construction and
hide all overhead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.training.rehearsal.conduct import rehearse
    from penstock.training.rehearsal.result import FigureComparison, Rehearsal
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.training.rehearsal.conduct": ("rehearse",),
            "penstock.training.rehearsal.result": ("FigureComparison", "Rehearsal"),
        },
    )


RehearsalTransport = Literal["shared-memory", "threads"]
WaitsName = Literal["relative", "logical"]
UpdateMode = Literal["separate", "agreed", "post-validated"]

__all__ = ["FigureComparison", "Rehearsal", "rehearse"]
