"""The best partition where any two devices have the same link and all are equally fast.

Under a ceiling for the slowest stage or cut, the layers behind a state need so many devices::

    f(j) = min over k of f(k) + r(j..k)

with r the fewest replicas that keep a stage under the ceiling. The least ceiling for which f of all
layers is at most the number of devices is the optimum. Devices that are not needed at the end of
the pipeline never hurt its beginning, neither by their number nor by microbatches in flight, so
memory only limits r and the answer stays exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import repeat
from math import ceil, inf

import numpy as np

from penstock.core.cluster import Link
from penstock.planning.partition.chain import ROUNDING, Array, CostModel
from penstock.planning.partition.steady.states import Fits, Piece, States, all_fit

_NEVER = 1 << 30
"""More replicas than anyone has; still a number, so that sums of it are."""


@dataclass(frozen=True)
class FlatTask:
    """The search for the best partition over devices that are all joined by the same link.

    Attributes:
        states: where cuts may be.
        cost_model: what stages and cuts cost.
        link: between any two devices.
        num_devices: at most so many are used.
        updates: how many there are per microbatch.
        most_replicas: the most that a stage may have; 1 for straight pipelines.
        speed: how fast every device is.
        fits: whether a stage may be like that; all may by default.
    """

    states: States
    cost_model: CostModel
    link: Link
    num_devices: int
    updates: float = 1.0
    most_replicas: int = _NEVER
    speed: float = 1.0
    fits: Fits | None = None


@dataclass(frozen=True)
class _Stages:
    """Stages that are possible, in the order of where they start: an array for each property."""

    starts: Array
    stops: Array
    compute: Array
    parameters: Array
    replicas: Array

    def some(self, kept: Array, replicas: Array) -> _Stages:
        """Those that ``kept`` marks, with their replicas."""
        arrays = (self.starts, self.stops, self.compute, self.parameters)
        starts, stops, compute, parameters = (array[kept] for array in arrays)
        return _Stages(starts, stops, compute, parameters, replicas)


@dataclass(frozen=True)
class FlatResult:
    """Stages, and the slowest stage or cut among them."""

    pieces: tuple[Piece, ...]
    seconds: float


_TINY = 1e-100
"""Seconds, in the place of none, so that one can divide by them."""

_STEP = 1 << 20
"""Counts of devices in steps of this, so that they compare first and numbers of stages second."""

_MANY = 64
"""Stages; among plans with more of them the number does not matter."""

_Choice = dict[int, tuple[int, int]]
"""From a state to where the stage that starts there ends, and its replicas."""


def search_flat(task: FlatTask, below: float = inf) -> FlatResult | None:
    """The optimum, or ``None`` if there is no partition (faster than ``below``)."""
    search = _FlatSearch(task)
    best = search.under(below * (1 - ROUNDING))
    if best is None:
        return None
    lowest = search.least_seconds
    step = 1.02
    at_rim = True
    while best.seconds > lowest * (1 + 4 * ROUNDING):
        # Every other ceiling is just under the best: the last proves that it is the optimum.
        at_rim = not at_rim
        if at_rim:
            ceiling = best.seconds * (1 - 2 * ROUNDING)
        elif 0 < lowest * step < best.seconds:
            # The optimum tends to be near the bound; ceilings far above it are slow to work with.
            ceiling, step = lowest * step, step * step
        else:
            ceiling = (lowest + best.seconds) / 2
        if ceiling <= lowest:
            break  # closer than numbers can tell
        faster = search.under(ceiling)
        if faster is None:
            lowest = ceiling
        else:
            best = faster
    return search.spread(search.shortest(best))


class _FlatSearch:
    """Answers for one ceiling after the other; remembers what a lower one cannot change."""

    def __init__(self, task: FlatTask) -> None:
        self.task = task
        states, model = task.states, task.cost_model
        self.most = min(task.most_replicas, task.num_devices)
        counts = range(1, self.most + 1)
        lines = [(0.0, 0.0), *(model.reduce_line(count, task.link) for count in counts)]
        self.slope, self.base = np.array(lines).T
        self.seconds = states.compute_seconds / task.speed
        self.cuts = np.array([model.cut_seconds(size, 1, task.link) for size in states.cut_bytes])
        self.cuts[[0, -1]] = 0.0
        starts, stops = np.nonzero(states.nested)
        parameters = states.gradient_bytes
        self.known = _Stages(
            starts=starts,
            stops=stops,
            compute=self.seconds[stops] - self.seconds[starts],
            parameters=parameters[stops] - parameters[starts],
            replicas=np.ones(len(starts), dtype=np.int64),
        )
        self.behind = np.zeros(len(self.cuts), dtype=np.int64)

    @property
    def least_seconds(self) -> float:
        """No partition is faster."""
        return float(self.seconds[-1]) / self.task.num_devices * (1 - 2 * ROUNDING)

    def under(self, ceiling: float) -> FlatResult | None:
        """A partition with no stage and no cut above ``ceiling``, if there is one."""
        ceiling = max(ceiling, _TINY)
        stages = self._stages(ceiling)
        ranks, choice = self._fewest(stages, ceiling)
        if ranks[0] // _STEP > self.task.num_devices:
            return None
        result = self._result(repeat(choice))
        self._forget(stages, ranks // _STEP, max(result.seconds, _TINY))
        return result

    def shortest(self, best: FlatResult) -> FlatResult:
        """As fast as the best, and with the fewest stages, if that is not too much to ask."""
        if len(best.pieces) > _MANY:
            return best
        ceiling = max(best.seconds, _TINY)
        stages = self._stages(ceiling)
        ranks = self._nothing_behind()
        choices: list[_Choice] = []
        for _ in best.pieces[1:]:
            ranks, choice = self._fewest(stages, ceiling, ranks)
            choices.insert(0, choice)
            if ranks[0] // _STEP <= self.task.num_devices:
                return self._result(choices)
        return best

    def spread(self, best: FlatResult) -> FlatResult:
        """Give what devices are left to the slowest stages, as long as that makes them faster."""
        pieces = list(best.pieces)
        left = self.task.num_devices - sum(piece.replicas for piece in pieces)
        waiting = [(-self._stage_seconds(piece), index) for index, piece in enumerate(pieces)]
        heapify(waiting)
        while left and waiting:
            _, slowest = heappop(waiting)
            piece = pieces[slowest]
            more = replace(piece, replicas=piece.replicas + 1)
            tried = [*pieces[:slowest], more, *pieces[slowest + 1 :]]
            if self._is_faster(more, piece) and self._all_fit(tried):
                pieces, left = tried, left - 1
                heappush(waiting, (-self._stage_seconds(more), slowest))
        return FlatResult(tuple(pieces), max(self._beats(pieces)))

    def _is_faster(self, more: Piece, piece: Piece) -> bool:
        if more.replicas > self.most:
            return False
        return self._stage_seconds(more) < self._stage_seconds(piece) * (1 - ROUNDING)

    def _all_fit(self, pieces: Sequence[Piece]) -> bool:
        between = self.task.states.between
        stages = [(between(piece.start, piece.stop), piece.replicas) for piece in pieces]
        return self.task.fits is None or all_fit(self.task.fits, stages)

    def _result(self, choices: Iterable[_Choice]) -> FlatResult:
        pieces, start = [], 0
        for choice in choices:
            pieces.append(Piece(start, *choice[start]))
            start = pieces[-1].stop
            if start == len(self.cuts) - 1:
                break
        return FlatResult(tuple(pieces), max(self._beats(pieces)))

    def _nothing_behind(self) -> Array:
        """Devices · _STEP + stages behind the last state, and too many behind all others."""
        ranks = np.full(len(self.cuts), _NEVER * _STEP, dtype=np.int64)
        ranks[-1] = 0
        return ranks

    def _stages(self, ceiling: float) -> _Stages:
        """Every stage that may be part of an answer, and the fewest replicas that keep it under
        ``ceiling``.

        A stage of m replicas takes work(m) / m seconds, and work never falls with m. So m must be
        at least work(m) / ceiling, and going there again and again ends at the least m that does.
        """
        known = self.known
        least = self._least_for_cuts(ceiling)
        before, behind = self._at_least(ceiling)
        at_once = _whole(known.compute * ((1 - ROUNDING) / ceiling))
        replicas = np.maximum(at_once, known.replicas)
        replicas = np.maximum(replicas, np.maximum(least[known.starts], least[known.stops]))
        left = self.task.num_devices - before[known.starts] - behind[known.stops]
        most = np.minimum(left, self.most)
        kept = replicas <= most
        stages, most = known.some(kept, replicas[kept]), most[kept]
        replicas, active = stages.replicas, np.arange(len(stages.replicas))
        while len(active):
            now = replicas[active]
            work = self._work(stages.compute[active], stages.parameters[active], now)
            wanted = _whole(work * ((1 - ROUNDING) / ceiling))
            grows = wanted > now
            active, wanted = active[grows], wanted[grows]
            replicas[active] = wanted
            active = active[wanted <= most[active]]
        kept = replicas <= most
        return stages.some(kept, replicas[kept])

    def _at_least(self, ceiling: float) -> tuple[Array, Array]:
        """Devices that the layers before each state need, and those behind it."""
        before = _whole(self.seconds * ((1 - 1e-9) / ceiling))
        rest = self.seconds[-1] - self.seconds
        behind = _whole(rest * ((1 - 1e-9) / ceiling))
        return before, np.maximum(behind, self.behind)

    def _work(self, compute: Array, parameters: Array, replicas: Array) -> Array:
        """``CostModel.shared_seconds`` times the number of replicas."""
        exchange = self.slope[replicas] * parameters + self.base[replicas]
        exchange = exchange * np.minimum(replicas * self.task.updates, 1.0)
        return self.task.cost_model.together(compute, exchange)

    def _least_for_cuts(self, ceiling: float) -> Array:
        """The fewest replicas of both stages at a cut behind each state."""
        ratio = self.cuts / ceiling * (1 - ROUNDING)
        if self.task.cost_model.shares_cuts:
            return _whole(ratio)
        return np.asarray(np.where(ratio <= 1, 1, _NEVER))

    def _fewest(
        self, stages: _Stages, ceiling: float, behind: Array | None = None
    ) -> tuple[Array, _Choice]:
        """Devices · _STEP + stages that the layers behind each state need, and how the first of
        these stages is.

        Args:
            stages: that are possible.
            ceiling: of each.
            behind: what the layers behind the first stage need; by default as little as possible.
        """
        ranks = self._nothing_behind()
        behind = ranks if behind is None else behind
        choice: _Choice = {}
        count = len(ranks)
        bounds = np.searchsorted(stages.starts, np.arange(count + 1))
        costs = stages.replicas * _STEP + 1
        for start in range(count - 2, -1, -1):
            some = slice(bounds[start], bounds[start + 1])
            if some.start == some.stop:
                continue
            totals = behind[stages.stops[some]] + costs[some]
            if self.task.fits is None:
                best = some.start + int(totals.argmin())
                ranks[start] = totals[best - some.start]
                choice[start] = (int(stages.stops[best]), int(stages.replicas[best]))
            else:
                ranks[start], choice[start] = self._first_that_fits(
                    stages, some.start, totals, behind, ceiling
                )
        return ranks, choice

    def _first_that_fits(
        self, stages: _Stages, first: int, totals: Array, ranks: Array, ceiling: float
    ) -> tuple[int, tuple[int, int]]:
        """Like the minimum of ``totals``, among stages that fit, perhaps on more replicas."""
        least, chosen = _NEVER * _STEP, (0, 0)
        for index in totals.argsort(kind="stable"):
            if totals[index] >= least:
                break
            stage = first + int(index)
            stop = int(stages.stops[stage])
            replicas = self._fitting(stages, stage, int(ranks[stop]) // _STEP, ceiling)
            rank = int(ranks[stop]) + replicas * _STEP + 1
            if rank < least:
                least, chosen = rank, (stop, replicas)
        return least, chosen

    def _fitting(self, stages: _Stages, stage: int, behind: int, ceiling: float) -> int:
        """The fewest replicas on which a stage fits and is fast enough."""
        fits = self.task.fits
        assert fits is not None
        layers = self.task.states.between(int(stages.starts[stage]), int(stages.stops[stage]))
        most = min(self.most, self.task.num_devices - behind)
        for count in range(int(stages.replicas[stage]), most + 1):
            work = self._work(stages.compute[stage], stages.parameters[stage], np.array(count))
            fast = work * ((1 - ROUNDING) / ceiling) <= count
            if fast and fits(layers, count, 1 + ceil(behind / count)):
                return count
        return _NEVER

    def _beats(self, pieces: Sequence[Piece]) -> list[float]:
        """Seconds of every stage and cut."""
        beats = []
        for piece in pieces:
            shared = piece.replicas if self.task.cost_model.shares_cuts else 1
            ends = max(self.cuts[piece.start], self.cuts[piece.stop])
            beats += [self._stage_seconds(piece), float(ends) / shared]
        return beats

    def _stage_seconds(self, piece: Piece) -> float:
        compute = self.seconds[piece.stop] - self.seconds[piece.start]
        sizes = self.task.states.gradient_bytes
        parameters = sizes[piece.stop] - sizes[piece.start]
        return float(self._work(compute, parameters, np.array(piece.replicas))) / piece.replicas

    def _forget(self, stages: _Stages, fewest: Array, ceiling: float) -> None:
        """Keep only stages that may be part of something faster; none will need fewer replicas."""
        self.behind = np.minimum(fewest, self.task.num_devices + 1)
        before, behind = self._at_least(ceiling)
        total = before[stages.starts] + stages.replicas + behind[stages.stops]
        kept = total <= self.task.num_devices
        self.known = stages.some(kept, stages.replicas[kept])


def _whole(numbers: Array) -> Array:
    """Rounded up; what is beyond all numbers of replicas stays just beyond."""
    return np.asarray(np.minimum(np.ceil(numbers), _NEVER).astype(np.int64))
