"""Cut a chain of layers into consecutive stages so that the slowest stage is as fast as possible.

A pipeline's beat is its slowest stage, so that is what the cuts minimise; among all cuts with that
beat they then make the stages as even as possible. Both are exact: a dynamic programme over (stage,
last layer), first with the maximum, then with the sum of squares under the best maximum as ceiling.
What a stage would cost from any first to any last layer is one table, so a step for all of them is
one operation on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite

from penstock.base.errors import InputError, PlanError
from penstock.planning.partition.arrays import Floats, np

Table = Floats
"""A number for every first layer (rows) and every layer behind a last one (columns)."""

ROUNDING = 1e-12
"""Relative: the same seconds summed in another order are still the same."""


def balance(
    costs: Sequence[float],
    num_stages: int,
    *,
    edges: Sequence[float] = (),
    speeds: Sequence[float] = (),
    extra: Callable[[int], Table] | None = None,
) -> tuple[int, ...]:
    """Cut ``costs`` into consecutive, non-empty stages whose slowest is as fast as possible.

    Of several such cuts, the most even one is returned (least sum of squared stage costs), and of
    several of those the one that gives early stages more: a slow stage near the end of the pipeline
    also delays its filling and draining.
    Takes O(n²) steps per stage, n the number of layers.

    >>> balance([1, 1, 1, 1, 2], num_stages=2)
    (0, 3, 5)

    Args:
        costs: seconds of each layer, usually forward and backward of one microbatch.
        edges: seconds that a cut behind layer k adds to the stage before it, a number for each
            layer but the last; by default a cut costs nothing.
        speeds: how fast each stage's device is; a stage takes its layers' seconds divided by that.
        extra: for a stage, what it takes on top with layers ``[start, stop)``, for example to run
            its forward again, ≥ 0; infinite where it may not hold them, for example for its memory.
            A table with n + 1 rows (start) and columns (stop).

    Returns:
        Where the stages begin and end: stage s holds layers ``cuts[s]`` to ``cuts[s + 1] - 1``. The
        first cut is 0, the last is the number of layers.

    Raises:
        InputError: a number is negative or not finite, or there is a wrong number of them.
        PlanError: there are fewer layers than stages, or no cuts are allowed by
            ``extra``.
    """
    _check(costs, num_stages, edges, speeds)
    behind = np.array([0.0, *(edges or (0.0,) * (len(costs) - 1)), 0.0])
    between = _sums(costs)

    def seconds(stage: int) -> Table:
        table: Table = (between / speeds[stage] if speeds else between) + behind
        return table if extra is None else table + extra(stage)

    slowest, cuts = _solve(num_stages, seconds, np.maximum)
    if slowest == inf:
        raise PlanError(
            f"no way to cut {len(costs)} layers into {num_stages} stages keeps every stage within "
            "its limit; raise the limits or change the number of stages"
        )

    def squares(stage: int) -> Table:
        table = seconds(stage)
        return np.where(table <= slowest * (1 + ROUNDING), table * table, inf)

    _, cuts = _solve(num_stages, squares, np.add)
    return cuts


def lightest(num_layers: int, num_stages: int, weight: Callable[[int], Table]) -> tuple[int, ...]:
    """Cut layers into consecutive, non-empty stages of the least total weight.

    Args:
        weight: for a stage, what it weighs with layers ``[start, stop)``; infinite where it may not
            hold them. A table as for ``balance``.

    Returns:
        The cuts, as ``balance`` gives them; none where nothing is allowed.
    """
    possible = _sums([0.0] * num_layers)
    least, cuts = _solve(num_stages, lambda stage: possible + weight(stage), np.add)
    return cuts if least < inf else ()


def _sums(costs: Sequence[float]) -> Table:
    """The sum over layers ``[start, stop)``; infinite where there is none between."""
    table = np.full((len(costs) + 1, len(costs) + 1), inf)
    for start in range(len(costs)):
        # Each from its own start, so that equal layers have equal sums wherever they are.
        table[start, start + 1 :] = np.cumsum(costs[start:])
    return table


def _solve(
    num_stages: int, price: Callable[[int], Table], combine: Callable[[Table, Table], Table]
) -> tuple[float, tuple[int, ...]]:
    """The least combined price over all cuts, and these cuts."""
    best, starts = np.zeros(1), []
    for stage in range(num_stages):
        table = price(stage)
        if stage == 0:
            best = np.full(len(table), inf)
            best[0] = 0.0
        score = combine(best[:, None], table)
        best = score.min(axis=0)
        # Of equals the last start is taken, which leaves more to the stages before.
        as_good = score[::-1] <= best * (1 + ROUNDING)
        starts.append(len(table) - 1 - as_good.argmax(axis=0))
    least, cuts = float(best[-1]), [len(best) - 1]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return least, tuple(reversed(cuts))


def _check(
    costs: Sequence[float], num_stages: int, edges: Sequence[float], speeds: Sequence[float]
) -> None:
    if num_stages < 1:
        raise InputError(f"num_stages is {num_stages}, but must be ≥ 1")
    if num_stages > len(costs):
        raise PlanError(
            f"{len(costs)} layers cannot make {num_stages} stages, each needs at least one; ask "
            f"for at most {len(costs)} stages"
        )
    _check_numbers("costs", costs, len(costs), lambda number: number >= 0)
    _check_numbers("edges", edges, len(costs) - 1, lambda number: number >= 0)
    _check_numbers("speeds", speeds, num_stages, lambda number: number > 0)


def _check_numbers(
    name: str, numbers: Sequence[float], count: int, valid: Callable[[float], bool]
) -> None:
    if len(numbers) not in (0, count):
        raise InputError(f"{name} has {len(numbers)} numbers, but {count} are needed")
    for index, number in enumerate(numbers):
        if not (isfinite(number) and valid(number)):
            bound = "> 0" if name == "speeds" else "≥ 0"
            raise InputError(f"{name}[{index}] is {number}, but must be {bound} and finite")
