"""``Judged``: what a race chose for some tasks, and the plan that is written of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from penstock.base.units import format_seconds
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.doubts import doubts_about
from penstock.planning.planner.offloading import weighed
from penstock.planning.planner.patience import PlanningPatience, verdict
from penstock.planning.planner.race import SAME, Race
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.task import Task
from penstock.planning.planner.variants import mixed
from penstock.planning.planner.why import (
    Rival,
    alternatives_of,
    coarsely,
    possible,
    reason_for,
    rivals,
    simulated,
    why_summed_so,
    why_sums_hide,
)
from penstock.planning.plans.plan import Plan


def raced(
    tasks: Sequence[Task],
    constraints: Constraints,
    patience: PlanningPatience,
    limit: float = inf,
) -> Race:
    """A race of all that constraints allow for one of some tasks; whoever interrupts it gets what
    is there.

    Args:
        limit: seconds beyond which nothing is of use.
    """
    race = Race(patience=patience, least=limit)

    def search() -> None:
        race.run(tasks, constraints)
        if constraints.engine is None:  # others have one degree of tensor parallelism
            race.enter(mixed(tasks, constraints))

    is_done = patience.spend(
        search, lambda: race.winner is not None, is_in_vain=lambda: race.num_missed > 0
    )
    race.end = patience.end
    race.is_complete = is_done and not race.end
    if not race.is_complete and not race.end:
        race.end = f"after {format_seconds(patience.seconds_spent)}"
    return race


class Judged(NamedTuple):
    """The choice for some tasks, before it is written down.

    Attributes:
        chosen: the winner.
        contenders: all that were simulated.
        tasks: what was asked for.
        constraints: under which.
        num_skipped: candidates that were not simulated.
        bound: seconds that no plan undercuts; 0 where nobody knows.
        end: when the search was stopped, in words; empty where it came to its end.
    """

    chosen: Candidate
    contenders: Sequence[Candidate]
    tasks: Sequence[Task]
    constraints: Constraints
    num_skipped: int = 0
    bound: float = 0.0
    end: str = ""

    @property
    def num_devices(self) -> int:
        """How many devices the plan takes."""
        return sum(len(self.chosen.task.devices.behind(d)) for d in self.chosen.setting.devices)

    def rivals(self, patience: PlanningPatience | None = None) -> dict[str, Rival]:
        """What else there was, by its kind.

        Args:
            patience: when it is over, what is known of a kind has to do.
        """
        alike = [task for task in self.tasks if task.reducer == self.chosen.task.reducer]
        known = self.chosen if len(alike) == len(self.tasks) else None
        return rivals(alike, self.constraints, known, patience)

    def explained(self, labelled: Mapping[str, Rival]) -> Plan:
        """The plan, with why it was chosen and what else there was.

        Args:
            labelled: the ``rivals``.
        """
        chosen, constraints = self.chosen, self.constraints
        named = dict(labelled)
        reason = reason_for(chosen, self.contenders, named, constraints)
        if chosen.way.reducer != "owners":
            reason += f" ({why_summed_so(chosen)})"
        if hides := why_sums_hide(chosen):
            reason += f" ({hides})"
        if chosen.task.is_coarse and not constraints.cuts:
            reason += f" ({coarsely(chosen.task)})"
        if self.num_skipped:
            skipped = self.num_skipped
            reason += f" ({skipped} candidates that promised less were not simulated)"
        others = possible([*self.contenders, *simulated(named)], chosen, constraints)
        doubts = tuple(doubts_about(chosen, others))
        return chosen.to_plan(reason, alternatives_of(chosen, named, constraints), doubts)

    def _best_of(self, labelled: Mapping[str, Rival]) -> Candidate:
        """The choice, or the fastest of its rivals, if that is what was asked for, too: a search
        that ended early may not have come to it."""
        others = possible(simulated(dict(labelled)), self.chosen, self.constraints)
        best = min(filter(self._does, others), key=lambda each: each.seconds, default=self.chosen)
        faster = best.seconds < self.chosen.seconds * (1 - SAME)
        return best if self.end and faster else self.chosen

    def _does(self, rival: Candidate) -> bool:
        """Whether a rival that constraints allow is for one of the tasks, and for their engine."""
        setting, count = rival.setting, rival.task.num_microbatches
        obstacle = self.constraints.obstacle(
            setting.family, setting.replicas, count, setting.num_ranks
        )
        is_task = any(rival.task is task for task in self.tasks)
        return is_task and obstacle is None and setting.is_final

    def plan(self, labelled: Mapping[str, Rival]) -> Plan:
        """The plan that is answered: ``explained``, with activations that leave where that is
        faster, and with why the search ended early, if it did."""
        best = self._best_of(labelled)
        known = dict(labelled)
        if best is not self.chosen:
            for label, rival in labelled.items():
                if rival.candidate is self.chosen:  # of whose kind there are better ones
                    known[label] = rival._replace(is_cut_short=True)
        plan = self._replace(chosen=best).explained(known)
        if ended := verdict(self.end, best.seconds, self.bound):
            plan = replace(plan, reason=f"{plan.reason} ({ended})")
        return weighed(plan, best.task, self.constraints)
