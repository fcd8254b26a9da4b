"""How long an order takes: the simulator's arithmetic on numbers instead of ops, for the many
orders that a search looks at."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.schedule.search.problem import NUM_KINDS, OrderingProblem, Orders

UNKNOWN = -1.0


class OrderScore(NamedTuple):
    """What an order comes to. Compares as a tuple."""

    objective: float
    """The makespan, or the longest time any rank needs from its first op to its last."""
    total: float
    """The sum over ranks of what the objective is the largest of: among equals, slack is better."""


def evaluate(problem: OrderingProblem, orders: Orders) -> tuple[OrderScore, list[float]] | None:
    """The outcome of ``orders``, and the end of each op by its number; ``None`` for a deadlock.

    Within a rank, each microbatch must run F, then I, then W; that is not checked.
    """
    arcs, period = problem.arcs, NUM_KINDS * problem.num_stages
    end = [UNKNOWN] * (period * problem.num_microbatches)
    first = [UNKNOWN] * problem.num_ranks
    free = [0.0] * problem.num_ranks
    position = [0] * problem.num_ranks
    waiting: dict[int, int] = {}
    runnable = list(range(problem.num_ranks))
    while runnable:
        rank = runnable.pop()
        order, place, time = orders[rank], position[rank], free[rank]
        count = len(order)
        while place < count:
            number = order[place]
            result, needed, delay, taken = arcs[number % period]
            if needed:
                arrival = end[number + needed]
                if arrival < 0:
                    waiting[number + needed] = rank
                    break
                arrival += delay
                time = max(arrival, time)
            if not place:
                first[rank] = time
            time += taken
            number += result
            end[number] = time
            place += 1
            if number in waiting:
                runnable.append(waiting.pop(number))
        position[rank], free[rank] = place, time
    if any(done < len(order) for done, order in zip(position, orders, strict=True)):
        return None
    if problem.objective == "makespan":
        lengths = free
    else:
        lengths = [last - start for last, start in zip(free, first, strict=True)]
    return OrderScore(max(lengths), sum(lengths)), end
