"""Cut a chain of layers into consecutive stages so that the slowest stage is as fast as possible.

A pipeline's beat is its slowest stage, so that is what the cuts minimise; among all cuts with that
beat they then make the stages as even as possible. Both are exact: a dynamic programme over (stage,
last layer), first with the maximum, then with the sum of squares under the best maximum as ceiling.
Layer costs are never negative, so a stage only gets slower as it reaches further back, and each
search for its first layer stops early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from penstock.errors import InputError, PlanError

Fits = Callable[[int, int, int], bool]
"""(stage, first layer, layer behind the last) → may this stage hold these layers?"""

_ROUNDING = 1e-12
"""Relative: the same seconds summed in another order are still the same."""


@dataclass(frozen=True)
class _Chain:
    costs: tuple[float, ...]
    edges: tuple[float, ...]
    speeds: tuple[float, ...]
    fits: Fits


def balance(
    costs: Sequence[float],
    num_stages: int,
    *,
    edges: Sequence[float] = (),
    speeds: Sequence[float] = (),
    fits: Fits | None = None,
) -> tuple[int, ...]:
    """Cut ``costs`` into consecutive, non-empty stages whose slowest is as fast as possible.

    Of several such cuts, the most even one is returned (least sum of squared stage costs), and of
    several of those the one that gives early stages more: a slow stage near the end of the pipeline
    also delays its filling and draining.
    Takes O(n²) steps per stage at worst and far fewer as a rule, n the number of layers.

    >>> balance([1, 1, 1, 1, 2], num_stages=2)
    (0, 3, 5)

    Args:
        costs: seconds of each layer, usually forward and backward of one microbatch.
        num_stages: how many stages, between 1 and the number of layers.
        edges: seconds that a cut behind layer k adds to the stage before it, a number for each
            layer but the last; by default a cut costs nothing.
        speeds: of each stage's device; a stage takes its layers' seconds divided by its speed.
        fits: whether a stage may hold layers ``[start, stop)``, for example by its memory; asked
            with (stage, start, stop).

    Returns:
        Where the stages begin and end: stage s holds layers ``cuts[s]`` to ``cuts[s + 1] - 1``. The
        first cut is 0, the last is the number of layers.

    Raises:
        InputError: a number is negative or not finite, or there is a wrong number of them.
        PlanError: there are fewer layers than stages, or no cuts satisfy ``fits``.
    """
    _check(costs, num_stages, edges, speeds)
    chain = _Chain(
        costs=tuple(costs),
        edges=(*(edges or (0.0,) * (len(costs) - 1)), 0.0),
        speeds=tuple(speeds) or (1.0,) * num_stages,
        fits=fits or (lambda stage, start, stop: True),
    )
    slowest, _ = _solve(chain, max, ceiling=inf)
    if slowest == inf:
        raise PlanError(
            f"no way to cut {len(costs)} layers into {num_stages} stages keeps every stage within "
            "its limit; raise the limits or change the number of stages"
        )
    _, cuts = _solve(chain, _add_square, ceiling=slowest * (1 + _ROUNDING))
    return cuts


def _add_square(score: float, cost: float) -> float:
    return score + cost * cost


def _solve(
    chain: _Chain, combine: Callable[[float, float], float], ceiling: float
) -> tuple[float, tuple[int, ...]]:
    """The least combined cost over all cuts with no stage above ``ceiling``, and these cuts."""
    num_layers, num_stages = len(chain.costs), len(chain.speeds)
    best = [0.0] + [inf] * num_layers  # best[k]: the first k layers, in the stages so far
    starts = []
    for stage in range(num_stages):
        row, start = [inf] * (num_layers + 1), [0] * (num_layers + 1)
        for stop in range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            row[stop], start[stop] = _best_start(chain, stage, stop, best, combine, ceiling)
        best = row
        starts.append(start)
    cuts = [num_layers]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return best[num_layers], tuple(reversed(cuts))


def _best_start(
    chain: _Chain,
    stage: int,
    stop: int,
    best: list[float],
    combine: Callable[[float, float], float],
    ceiling: float,
) -> tuple[float, int]:
    """(least combined cost, first layer) of ``stage`` if it ends before layer ``stop``."""
    least, chosen, seconds = inf, 0, 0.0
    for start in range(stop - 1, stage - 1, -1):
        seconds += chain.costs[start]
        cost = seconds / chain.speeds[stage] + chain.edges[stop - 1]
        # Of equals the shorter one is kept, which leaves more to the stages before.
        bound = least * (1 - _ROUNDING)
        if cost > ceiling or combine(0.0, cost) >= bound:
            break
        score = combine(best[start], cost)
        if score < bound and chain.fits(stage, start, stop):
            least, chosen = score, start
    return least, chosen


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
