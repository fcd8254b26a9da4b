"""The exact order for a small pipeline: a mixed-integer linear program, solved to proof by HiGHS.

Variables are the start of every op and, for each two ops of one rank whose order is open, a binary
that says which comes first. What makes it fast is done before the solver starts: an order that is
known already bounds the optimum from above, heads, tails and Jackson's one-machine bound from
below; and every order of two ops that cannot beat the bound from above is ruled out, again and
again, until nothing changes (Carlier and Pinson, "An Algorithm for Solving the Job-Shop Problem",
Management Science 35, 1989). Often nothing is left to solve.

Within a stage and a kind, microbatches run in order, and nothing is lost by it: take any schedule
and name the k-th forward of each stage, by time, microbatch k, and its I and W likewise. The k-th
forward of a stage cannot start before k forwards have come in from the stage before, so the k-th of
those has come in too; the same goes for I and W, as all microbatches take equally long. No op has
moved, and as much is held as before. So binaries are needed only between F, I and W of one stage
and between the stages of one rank.
"""

from __future__ import annotations

from time import monotonic

import numpy as np

from penstock.base.errors import InputError, ScheduleError
from penstock.core.schedule.search.program import (
    NEVER,
    ExactProblem,
    Floats,
    LinearProgram,
    Order,
    StartWindows,
    load_solver,
    objective_of,
)

PRECISION = 1e-6
"""An order may exceed the optimum by this part of it, to which the solver computes."""


def minimise(problem: ExactProblem, known: Order, time_limit_seconds: float) -> Order:
    """The order of each rank's ops whose objective is least, to one part in a million.

    Args:
        known: an order that fits the memory; the better it is, the less is left to solve.
        time_limit_seconds: when to give up.

    Raises:
        InputError: not proven in time, or scipy is not installed.
        ScheduleError: the solver's answer does not stand up to a recount.
    """
    # 1. Bounds: the known order from above, one-machine bounds from below.
    solve = load_solver()
    deadline = monotonic() + time_limit_seconds
    windows = StartWindows(problem, problem.gap)
    least = windows.lower_bound(problem)
    bound = objective_of(problem, known)
    cutoff = bound * (1 - PRECISION)
    if least >= cutoff:
        return known
    # 2. Orders of two ops that cannot beat what is known are ruled out.
    narrowed = _rule_out(problem, windows, cutoff)
    if narrowed is None:
        return known
    # 3. What is left open, the solver decides.
    program = LinearProgram(problem, *narrowed, bounds=(least, cutoff))
    status, promised, values = solve(program, deadline - monotonic(), PRECISION)
    if status == "infeasible":
        # Nothing is below the cutoff, so what was known is the best.
        return known
    if status != "optimal":
        raise InputError(
            f"optimal: not proven within {time_limit_seconds:g} s ({status}): an order of "
            f"{bound:g} is known, and none is below {least:g}; raise time_limit_seconds, or take "
            "zb-auto, which searches without proof"
        )
    # 4. Its answer is an order, which is counted again by other means.
    order = _decode(problem, program, values)
    recounted = objective_of(problem, order)
    if recounted > promised + 3 * PRECISION * bound:
        raise ScheduleError(
            f"optimal: the solver promised {promised:g}, but its order takes {recounted:g}; leave "
            "out costs that are next to nothing beside the others, or take zb-auto"
        )
    return order


def _rule_out(
    problem: ExactProblem, windows: StartWindows, cutoff: float
) -> tuple[Floats, StartWindows] | None:
    """Add to the gaps each order of two ops without which the objective would exceed ``cutoff``;
    ``None`` if nothing can stay within it."""
    gap, duration, rank = problem.gap, problem.duration, np.array(problem.rank)
    same_rank = rank[:, None] == rank
    while windows.possible:
        after = duration + windows.tail
        if (windows.head + after > cutoff).any():
            return None
        is_open = (windows.far == NEVER) & (windows.far.T == NEVER) & same_rank
        # With b first, a starts no earlier than b ends.
        b_first = (windows.head + duration)[None, :] + after[:, None]
        forced = is_open & (b_first > cutoff)
        if not forced.any():
            return gap, windows
        gap = np.where(forced, duration[:, None], gap)
        windows = StartWindows(problem, gap)
    return None


def _decode(problem: ExactProblem, program: LinearProgram, values: Floats) -> Order:
    """The order that the binaries say; starts decide only where times of zero leave a circle."""
    done: set[int] = set()
    order: Order = [[] for _ in problem.room]
    left = sorted(range(len(problem.ops)), key=lambda number: (values[number], number))
    after = {b: program.first_of(b, values) for b in left}
    while left:
        can = [b for b in left if all(a in done for a, _ in problem.needs[b])]
        b = next((b for b in can if after[b] <= done), can[0])
        order[problem.rank[b]].append(b)
        done.add(b)
        left.remove(b)
    return order
