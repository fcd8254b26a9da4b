"""A chain of layers cut into stages so that the slowest is as fast as possible, and what stages and
cuts cost in the steady state: three cost models, by name.

A pipeline's beat is its slowest part, so that is what the cuts minimise; among all cuts with that
beat they then make the stages as even as possible. Both are exact: a dynamic programme over (stage,
last layer), first with the maximum, then with the sum of squares under the best maximum as ceiling.
What a stage would cost with any few layers that follow one another is one table, so a step for all
of them is one operation on arrays.

The slowest part is a stage on its devices, or a cut on its links. All cost models count seconds per
microbatch and differ in three things: how long an exchange of gradients takes, how much of it hides
behind compute, and what a cut costs.

``pipedream-released``
    What PipeDream's published optimizer computes: ``(T + 4(m−1)·|w| / (m·B)) / m`` for a stage of T
    seconds and |w| bytes on m devices, and ``2·a / (m·B)`` for a cut of a bytes.
``pipedream-paper``
    What the paper says (SOSP'19, section 3.1): ``max(T, 2(m−1)·|w| / B) / m``, and ``2·a / B``.
``ring``
    A ring all-reduce: ``2(m−1)/m · |w| / B`` and 2(m−1) latencies. ``overlap`` is the share of it
    that compute can hide. A cut takes two messages with their latencies, shared by m devices.

The first two know no latencies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError, PlanError
from penstock.base.values import is_number, one_of, shown
from penstock.core.cluster import Link

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


ExchangeLine = tuple[float, float]
"""(seconds per byte of parameters, seconds besides) of an exchange of gradients."""

RELEASED, PAPER, RING = "pipedream-released", "pipedream-paper", "ring"

COST_MODELS = (RELEASED, PAPER, RING)
"""Names of the cost models."""


@dataclass(frozen=True)
class CostModel:
    """Seconds per microbatch of stages and cuts; see the module for the formulas.

    Attributes:
        name: one of ``COST_MODELS``.
        overlap: the share of a gradient exchange that compute can hide, between 0 and 1. Only
            ``ring`` leaves it free: the released optimizer adds the two (0), the paper takes the
            longer one (1). ``cost_model`` sees to that.
    """

    name: str
    overlap: float = 1.0

    def shared_seconds(
        self,
        compute_seconds: float,
        exchange_seconds: float,
        num_replicas: int,
        updates: float = 1.0,
    ) -> float:
        """Steady-state seconds per microbatch of a stage.

        Args:
            compute_seconds: forward and backward of one microbatch on one device.
            exchange_seconds: one exchange of gradients (``reduce_seconds``).
            num_replicas: devices that share the microbatches.
            updates: per microbatch; 1/m where m microbatches make one. Replicas exchange gradients
                once per update, and at most once per round in which each has one microbatch, which
                is what 1 means (PipeDream).
        """
        compute = compute_seconds / num_replicas
        exchange = exchange_seconds * min(updates, 1 / num_replicas)
        shown = 1 - self.overlap
        return max(compute, exchange) + shown * min(compute, exchange)

    def together(self, compute: Array, exchange: Array) -> Array:
        """``shared_seconds`` of many stages at once, whose two parts are shared already."""
        shown = 1 - self.overlap
        return np.asarray(np.maximum(compute, exchange) + shown * np.minimum(compute, exchange))

    def cut_seconds(self, num_bytes: float, num_replicas: int, link: Link) -> float:
        """Seconds per microbatch that a cut takes: a message forward, and its gradient back.

        Args:
            num_bytes: in one direction.
            num_replicas: of the side that has fewer, since each sends and receives at a time.
            link: the slowest that is used.
        """
        if self.name == RING:
            return 2 * link.seconds(num_bytes) / num_replicas
        return 2 * _transfer(num_bytes, link) / (num_replicas if self.shares_cuts else 1)

    @property
    def shares_cuts(self) -> bool:
        """Whether replicas share what a cut costs; not so in the paper's formulas."""
        return self.name != PAPER

    def reduce_seconds(self, parameter_bytes: float, num_replicas: int, link: Link) -> float:
        """Seconds of one exchange of gradients, alone.

        Args:
            parameter_bytes: of the stage.
            num_replicas: devices that have a copy each; one has nobody to ask.
            link: the slowest between them.
        """
        others = num_replicas - 1
        seconds = self.bytes_moved(num_replicas) * _transfer(parameter_bytes, link)
        return seconds + 2 * others * self.latency_seconds(link)

    def reduce_line(self, num_replicas: int, link: Link) -> ExchangeLine:
        """``reduce_seconds`` as a line over the bytes of parameters."""
        per_byte = 1 / link.bytes_per_second if link.bytes_per_second else 0.0
        base = self.reduce_seconds(0.0, num_replicas, link)
        return self.bytes_moved(num_replicas) * per_byte, base

    def bytes_moved(self, num_replicas: int) -> float:
        """How many bytes an exchange puts on a link for each byte of parameters."""
        others = num_replicas - 1
        if self.name == PAPER:
            return 2.0 * others
        return (4 if self.name == RELEASED else 2) * others / num_replicas

    def latency_seconds(self, link: Link) -> float:
        """The seconds that a message takes besides its bytes, for this model."""
        return link.latency_seconds if self.name == RING else 0.0


def cost_model(name: str, overlap: float = 1.0) -> CostModel:
    """The cost model called ``name``.

    Args:
        name: one of ``COST_MODELS``.
        overlap: for ``ring``: the share of a gradient exchange that compute can hide, 0 to 1. The
            other two have their own.

    Raises:
        InputError: no such name, or ``overlap`` is not between 0 and 1.
    """
    one_of("cost_model", name, COST_MODELS)
    if not is_number(overlap) or not 0 <= overlap <= 1:
        raise InputError(f"overlap is {shown(overlap)}, but must be a number between 0 and 1")
    fixed = {RELEASED: 0.0, PAPER: 1.0}
    return CostModel(name, fixed.get(name, float(overlap)))


def check_updates(updates: float) -> None:
    """Raise ``InputError`` unless these may be the updates per microbatch."""
    if not is_number(updates) or not 0 < updates <= 1:
        raise InputError(f"updates is {shown(updates)}, but must be a number above 0 and at most 1")


def _transfer(num_bytes: float, link: Link) -> float:
    return num_bytes / link.bytes_per_second if link.bytes_per_second else 0.0


Table = Floats
"""A number for every way to hold layers that follow one another: row k has those of k + 1 layers,
by the layer behind the last one. A cost is infinite where there are not so many layers before it.
"""

ROUNDING = 1e-12
"""Relative: the same seconds summed in another order are still the same."""


Extra = Callable[[int, "Ints", "Ints"], Floats]
"""For a stage, a number for each of some ways to hold layers ``[start, stop)``."""


def balance(
    costs: Sequence[float],
    num_stages: int,
    *,
    edges: Sequence[float] = (),
    speeds: Sequence[float] = (),
    extra: Extra | None = None,
    longest: Sequence[int] = (),
    kinds: Sequence[Hashable] = (),
    most: Sequence[float] = (),
) -> tuple[int, ...]:
    """Cut ``costs`` into consecutive, non-empty stages whose slowest is as fast as possible.

    Of several such cuts, the most even one is returned (least sum of squared stage costs), and of
    several of those the one that gives early stages more: a slow stage near the end of the pipeline
    also delays its filling and draining.
    Takes O(n w) steps per stage, n the number of layers, w how many of them a stage may have that
    is no slower than the slowest one must be.

    >>> balance([1, 1, 1, 1, 2], num_stages=2)
    (0, 3, 5)

    Args:
        costs: seconds of each layer, usually forward and backward of one microbatch.
        edges: seconds that a cut behind layer k adds to the stage before it, a number for each
            layer but the last; by default a cut costs nothing.
        speeds: how fast each stage's device is; a stage takes its layers' seconds divided by that.
        kinds: of each stage; those of one kind have equal speeds, and the same ``extra``. By
            default all stages are different.
        extra: for a stage, what it takes on top with layers ``[start, stop)``, for example to run
            its forward again, ≥ 0; infinite where it may not hold them, for example for its memory.
            It is asked for arrays of starts and of stops at once, those that may matter.
        longest: the most layers that each stage may have, as far as that is known.
        most: seconds that a stage may take, by its first layer; that there are no such cuts is
            known sooner than which are the best. By default there is no such limit.

    Returns:
        Where the stages begin and end: stage s holds layers ``cuts[s]`` to ``cuts[s + 1] - 1``. The
        first cut is 0, the last is the number of layers.

    Raises:
        InputError: a number is negative or not finite, or there is a wrong number of them.
        PlanError: there are fewer layers than stages, or no cuts are allowed by
            ``extra`` and ``most``.
    """
    _check(costs, num_stages, edges, speeds)
    behind = np.array([0.0, *(edges or (0.0,) * (len(costs) - 1)), 0.0])
    stages = _ChainStages(
        _SecondsOfRuns(costs), behind, speeds, extra, longest, kinds, num_stages,
        np.array([*most, inf]) if len(most) else None,
    )  # fmt: skip
    slowest = _least_slowest(stages, sum(costs) / min(speeds, default=1.0), max(most, default=inf))
    if slowest == inf:
        raise PlanError(
            f"no way to cut {len(costs)} layers into {num_stages} stages keeps every stage within "
            "its limit; raise the limits or change the number of stages"
        )
    bands = stages.bands(slowest * (1 + ROUNDING))
    _, cuts = _solve((band * band for band in bands), np.add)
    return cuts


def least_slowest(costs: Sequence[float], num_stages: int) -> float:
    """Seconds of the slowest of some stages on equal devices where it is as fast as possible.

    >>> least_slowest([1, 1, 1, 1, 2], num_stages=2)
    3.0

    Args:
        costs, num_stages: as for ``balance``; no fewer layers than stages.
    """
    behind = np.zeros(len(costs) + 1)
    stages = _ChainStages(
        _SecondsOfRuns(costs), behind, (), None, (), (0,) * num_stages, num_stages
    )
    return _least_slowest(stages, sum(costs), inf)


def _least_slowest(stages: _ChainStages, whole: float, most: float) -> float:
    """Seconds of the slowest stage where it is as fast as possible; infinite where no cuts are
    allowed. Only stages that take up to a limit are looked at; it is raised until there are cuts
    within it, and then these are the best of all.

    Args:
        whole: about how long all layers would take on one device.
        most: the highest limit.
    """
    limit = min(1.5 * whole / stages.num_stages or inf, most)
    while True:
        stages.is_cut = False
        slowest = inf
        for _, best in _scores(stages.bands(limit), np.maximum):
            slowest = float(best[-1])
            if best.min() == inf:
                break  # further stages find no layers to begin with
        if slowest < inf or not stages.is_cut or limit >= most:
            return slowest
        limit = min(2 * limit if limit < whole else inf, most)


class _SecondsOfRuns:
    """The seconds of layers that follow one another, a ``Table`` whose rows are made when somebody
    asks for them.

    Args:
        costs: seconds of each layer.
    """

    def __init__(self, costs: Sequence[float]) -> None:
        self._costs = np.array(costs, dtype=np.float64)
        self._rows: list[Floats] = []
        self._shortest: list[float] = []

    def within(self, limit: float) -> Table:
        """The rows in which something is within a limit."""
        count = len(self._costs)
        while len(self._rows) < count and (not self._rows or self._shortest[-1] <= limit):
            length = len(self._rows)
            row = np.full(count + 1, inf)
            # Each sum from its own start, so that equal layers have equal sums wherever they are.
            before = self._rows[-1][length:-1] if self._rows else 0.0
            row[length + 1 :] = before + self._costs[length:]
            self._rows.append(row)
            self._shortest.append(float(row.min()))
        return np.array(self._rows[: max(bisect_right(self._shortest, limit), 1)])


@dataclass
class _ChainStages:
    """The stages of a chain, and what they cost.

    Attributes:
        runs: seconds of layers.
        behind: seconds of a cut at each place.
        speeds, extra, longest, kinds, num_stages, most: as ``balance`` has them.
        is_cut: whether a limit on seconds has ruled anything out that a higher one would not.
    """

    runs: _SecondsOfRuns
    behind: Floats
    speeds: Sequence[float]
    extra: Extra | None
    longest: Sequence[int]
    kinds: Sequence[Hashable]
    num_stages: int
    most: Floats | None = None
    is_cut: bool = False

    def bands(self, limit: float) -> Iterator[Table]:
        """What each stage costs, up to a limit, with as many rows as have anything; of each kind,
        it is made once. What takes longer than a limit without anything on top need not be asked
        about."""
        alone: dict[tuple[float, int], Table] = {}
        known: dict[Hashable, Table] = {}
        for stage in range(self.num_stages):
            kind = self.kinds[stage] if self.kinds else stage
            if kind not in known:
                most = self.longest[stage] if self.longest else len(self.behind) - 1
                speed = self.speeds[stage] if self.speeds else 1.0
                if not self.kinds:
                    known.clear()
                if (speed, most) not in alone:
                    alone[speed, most] = self._alone(speed, most, limit)
                known[kind] = self._with_extra(stage, alone[speed, most], limit)
            yield known[kind]

    def _alone(self, speed: float, most: int, limit: float) -> Table:
        rows = self.runs.within(limit * speed * (1 + ROUNDING))
        self.is_cut |= len(rows) < most
        return self._limited(rows[:most] / speed + self.behind, limit)

    def _with_extra(self, stage: int, alone: Table, limit: float) -> Table:
        if self.extra is None:
            return alone
        return self._limited(alone + self.extra(stage, *self._bounds(len(alone))), limit)

    def _limited(self, price: Table, limit: float) -> Table:
        if self.most is not None:
            price[price > _at_starts(self.most, len(price))] = inf
        over = price > limit
        over &= price < inf
        if over.any():
            self.is_cut = True
            price[over] = inf
        longest = int(np.flatnonzero(price.min(axis=1) < inf).max(initial=0)) + 1
        return price[:longest]

    def _bounds(self, num_rows: int) -> tuple[Ints, Ints]:
        """The starts and stops of what so many rows have."""
        starts = starts_of(num_rows, len(self.behind))
        return starts, np.broadcast_to(np.arange(len(self.behind)), starts.shape)


def lightest(num_layers: int, num_stages: int, weight: Callable[[int], Table]) -> tuple[int, ...]:
    """Cut layers into consecutive, non-empty stages of the least total weight.

    Args:
        weight: for a stage, what it weighs with any layers; infinite where it may not hold them.

    Returns:
        The cuts, as ``balance`` gives them; none where nothing is allowed.
    """
    possible = _SecondsOfRuns([0.0] * num_layers).within(inf)
    least, cuts = _solve((possible + weight(stage) for stage in range(num_stages)), np.add)
    return cuts if least < inf else ()


def _solve(
    bands: Iterable[Table], combine: Callable[[Table, Table], Table]
) -> tuple[float, tuple[int, ...]]:
    """The least combined price over all cuts, and these cuts."""
    chosen: list[Ints] = []
    for score, best in _scores(bands, combine):
        # Of equals the last start is taken, which leaves more to the stages before.
        as_good = score <= best * (1 + ROUNDING)
        chosen.append(np.arange(len(best)) - 1 - as_good.argmax(axis=0))
        least = float(best[-1])
    cuts = [len(chosen[0]) - 1]
    for start in reversed(chosen):
        cuts.append(int(start[cuts[-1]]))
    return least, tuple(reversed(cuts))


def _scores(
    bands: Iterable[Table], combine: Callable[[Table, Table], Table]
) -> Iterator[tuple[Table, Floats]]:
    """Stage by stage, the least combined price of it and those before it: for any layers of it, and
    for the best ones, by the layer behind the last one.

    Args:
        bands: what each stage costs.
    """
    best: Floats | None = None
    for band in bands:
        if best is None:
            best = np.full(band.shape[1], inf)
            best[0] = 0.0
        score = combine(_at_starts(best, len(band)), band)
        best = score.min(axis=0)
        yield score, best


@lru_cache(maxsize=8)
def starts_of(num_rows: int, num_places: int) -> Ints:
    """The places where so many rows of a table start; 0 where that would be before the first."""
    starts: Ints = np.arange(num_places) - np.arange(1, num_rows + 1)[:, None]
    return starts.clip(0)


def _at_starts(numbers: Floats, num_rows: int) -> Table:
    """A number for each place, as so many rows of a table that has it where layers start."""
    padded = np.concatenate([np.full(num_rows, inf), numbers])
    (step,) = padded.strides
    shape, begin = (num_rows, len(numbers)), (num_rows - 1) * step
    return np.ndarray(shape, np.float64, padded, begin, (-step, step))  # each row one place later


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
