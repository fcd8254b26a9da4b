"""What comes closest to its limits where nothing keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf

from penstock.base.errors import InputError, PlanError
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import candidates, refined, with_cuts
from penstock.planning.planner.offers import guided, offers
from penstock.planning.planner.promises import by_promise
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.task import Task

_MOST_FINER = 20


def ever_closer(tasks: Sequence[Task], constraints: Constraints) -> Iterator[Candidate]:
    """Candidates of which each misses its limits by fewer bytes than those before, the last one by
    the fewest; none if nothing can be built.

    Each candidate tightens the slack for the next, so that what remains is the least excess. Where
    the search does not cut between all layers, it then looks at those near the cuts, and may find
    what fits.
    """
    least, nearest = inf, None
    for _, task, offer in by_promise(tasks, constraints, offers, guided):
        with suppress(InputError, PlanError):
            setting = offer.setting(task)
            again = constraints.allows(setting.num_stages)
            while again:
                again = False
                given = [with_cuts(task, setting, constraints.cuts)] if constraints.cuts else []
                for candidate in given or candidates(task, setting, slack=least - 1):
                    over = candidate.excess.num_bytes
                    if over < least:
                        least, nearest, again = over, candidate, True
                        yield candidate
    if nearest is not None and not constraints.cuts:
        yield from _with_finer_cuts(nearest)


def _with_finer_cuts(nearest: Candidate) -> Iterator[Candidate]:
    """With cuts between other layers near by, as long as these miss the limits by less."""
    for _ in range(_MOST_FINER):
        slack = nearest.excess.num_bytes - 1
        finer = refined(nearest, slack)
        if nearest.fits or not finer:
            break
        nearest = min(finer, key=lambda candidate: candidate.excess.num_bytes)
        yield nearest
