"""When ops run: what they cost, a simulator that says when each would run, and what that tells.

``costs`` are the durations of ops and messages; ``simulator`` turns a schedule and costs into a
``timeline``, which is made of ``spans``; of a timeline, ``analysis`` says where its gaps come from,
what its ops cost, and where it departs from its prediction.

What links carry is a part of a timeline (``Transfer``), beside what ranks do. ``costs`` has the
flow shop by which sums of gradients pass while backwards run.

Decisions:

Two ways through a schedule, one meaning. ``go_through`` is the one to read: rank by rank, as far as
each can. ``in_waves`` lets all ranks take a step at once in numpy, which is quicker where they are
many and wait for nothing but each other; tests hold both to the same bits as a third, op by op.
Where ranks share something beside (a card, a link, a sum), ``InOrderOfTime`` lets whatever comes
first in time take it first, whichever rank it is of; a walk rank by rank would not know.

A live source is part of the simulation, and so is the rule by which it lets frames in: of a stream
whose backwards go through the newest activations, as many at once as there are stages. The order of
its ops alone would let twice as many in, which then wait between stages.

The pace of a stream is read off its forwards, over whole periods of their rhythm (``beat``): a
loop of n microbatches has a rhythm of n, and any other length tells another pace. Forwards know
nothing of how a stream ends.

Idle time is split by thinking the step through again, once with usual op times and free messages,
once with real op times and free messages. A gap has no single cause; what one cause adds to the
step has a number. Communication that compute hides costs nothing and counts as nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.core.timing.analysis import (
        TOLERANCE,
        Cause,
        Idle,
        Parting,
        find_parting,
        idle_of,
        measured_costs,
    )
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.core.timing.analysis": (
                "TOLERANCE",
                "Cause",
                "Idle",
                "Parting",
                "find_parting",
                "idle_of",
                "measured_costs",
            ),
        },
    )

__all__ = ["TOLERANCE", "Cause", "Idle", "Parting", "find_parting", "idle_of", "measured_costs"]
