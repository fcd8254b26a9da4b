"""From a profile and a cluster to a plan.

``request`` is what somebody asks for, and the ``constraints`` that follow for a model. ``task`` is
what is planned, ``ties`` what of it layers share, ``variants`` the same in other words: layers in
another order, devices in groups. ``offers`` are the schedules and devices worth building, in the
``orders`` in which devices become ranks, a ``setting`` is one that is built, with the memory that
it has; ``cuts`` is where its stages begin, a ``candidate`` both together: ``pricing`` says what its
stages cost, ``limits`` what it may need and takes at least. ``race`` finds the best, ``why`` says
what decided, ``shortfall`` why there is none; ``doubts`` what makes it uncertain.
``live`` finds the fewest devices that keep up with a source, ``objective`` the fewest that do, or
cost least; ``choosing`` what there is to choose from. ``spilling`` plans for stages that
come from a tier and leave again, where nothing fits otherwise; ``offloading`` holds activations
that wait in a tier against forwards that run twice. ``changes`` asks what if, ``replanning`` plans
for other devices what has begun.

Decisions:

The planner has one judge, the simulator, and everything before it only saves its time. An exact
partition of the steady state, DAPPLE's bound and width × depth propose which stages get replicas;
cuts are exact for each setting; lower bounds, never estimates, decide what need not be simulated,
and a test holds each bound against the simulation. Replicas of the winner are then moved from stage
to stage as long as that helps, because no proposal knows the start and the end of a step.

What no memory holds is refused before anything is searched (``limits.least_excess``), and offers
whose ranks have no room for the weights are not built (``limits.lacks_room``); tests hold these
bounds, too, against what candidates need. Of deep models, two things are guessed: a schedule that
came nowhere near the best with more ranks is not built for fewer, and of many stages only the
busiest give layers away.

Of pipelines that stand side by side and do the same, two are built and simulated, the first and the
last (``Terms.folded``), so that 16,384 devices cost what 16 do; only where they wait for each other
at cards that they share, all are. Devices that look alike are priced once
(``TaskDevices.kind_of``), and stages once for all cuts that give them the same layers.

Memory is part of the cut, not a filter behind it: for every stage, first and last layer, a table
tells how much the order of the ops keeps (``schedule.memory.loads``, exact for ranks with one
stage), whether that fits, and whether it fits if forwards run twice; the dynamic programme
minimises over that table.

Bytes over a cut are counted per value, up to its last reader. A profile says what a layer hands to
the next one (``output_bytes``), past it (``skip_bytes``), and what it only has to come after
(``after``).

An asynchronous plan is never proposed unasked; the table shows what it would give.

What shares layers (tensor parallelism) is planned as another task: groups of devices become one
device of another model, whose layers cost what the group takes. Cuts, schedules and replicas then
need no second search.

Plans within 1 % of each other count as equally fast; the one that needs less memory wins. No
prediction is exact enough to tell them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.planning.planner.changes import WhatIf, what_if
    from penstock.planning.planner.choosing import PlanChoices, choices
    from penstock.planning.planner.replanning import replan
    from penstock.planning.planner.search import plan
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.planning.planner.changes": ("WhatIf", "what_if"),
            "penstock.planning.planner.choosing": ("PlanChoices", "choices"),
            "penstock.planning.planner.replanning": ("replan",),
            "penstock.planning.planner.search": ("plan",),
        },
    )

__all__ = ["PlanChoices", "WhatIf", "choices", "plan", "replan", "what_if"]
