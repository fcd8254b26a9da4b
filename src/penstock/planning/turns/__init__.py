"""Many models at once on fewer devices: whose turn it is.

``visits`` cuts a plan's minibatch into units, says which model a free device takes, and what no
order could undercut; ``stop`` says how long models train; ``simulator`` predicts what a fleet does;
``written`` reads a fleet from a file. What performs all this is ``training/fleet``, above the torch
line, which asks the same policies.

The ideas are from Nagrecha and Kumar, "Hydra: A System for Large Multi-Model Deep Learning", arXiv
2110.08633: SHARP (section 5: units of different models share devices freely, those of one model
stay in order) and Sharded-LRTF (a free device takes the model with the longest remaining time).

Decisions:

- A unit is a visit: all that a rank does to one stage before it goes on to another. It is what a
  plan's schedule says already, so that spilled models and models that fit need no second order;
  one that is not cut gives its device back after each minibatch.
- Devices decide when they are free, never before: which stage is fetched meanwhile is a guess, and
  a wrong one costs a wait, not the order. Longest first then keeps its bound.
- A fleet's timeline is a value of its own (``timing/fleet_timeline.py``): in a ``Schedule`` a stage
  has one rank, and here every device may visit every stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.planning.turns.simulator import TimedJob, simulate_fleet
    from penstock.planning.turns.stop import Stop
    from penstock.planning.turns.visits import (
        POLICIES,
        Bound,
        PolicyName,
        StageVisit,
        bound,
        visits_of,
    )
    from penstock.planning.turns.written import FleetFile
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.planning.turns.simulator": ("TimedJob", "simulate_fleet"),
            "penstock.planning.turns.stop": ("Stop",),
            "penstock.planning.turns.visits": (
                "POLICIES",
                "Bound",
                "PolicyName",
                "StageVisit",
                "bound",
                "visits_of",
            ),
            "penstock.planning.turns.written": ("FleetFile",),
        },
    )

__all__ = [
    "POLICIES",
    "Bound",
    "FleetFile",
    "PolicyName",
    "StageVisit",
    "Stop",
    "TimedJob",
    "bound",
    "simulate_fleet",
    "visits_of",
]
