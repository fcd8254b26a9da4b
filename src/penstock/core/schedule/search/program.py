"""The exact search's problem, the windows in which its ops can start, and its linear program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from time import monotonic

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.core.schedule.durations import Durations, Placement
from penstock.core.schedule.op import Kind, Op, dependencies

Floats = npt.NDArray[np.float64]
NEVER = -np.inf

Order = list[list[int]]
"""The numbers of the ops of each rank, in their order."""

Gaps = tuple[tuple[int, float], ...]
"""Ops, and how long after the start of one of two the other can start."""

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, eq=False)
class ExactProblem:
    """Ops that are to be ordered; number n is ``ops[n]``.

    Attributes:
        ops: all of them, by stage, kind and microbatch.
        rank: the rank of each op.
        duration: how long each op takes.
        gap: ``gap[a, b]`` is how long after the start of a, b can start at the earliest; −∞ where b
            does not need a.
        room: how many forwards each rank may hold at once.
        by_stage: whether each rank's end counts from its own first start, not from time 0.
    """

    ops: tuple[Op, ...]
    rank: tuple[int, ...]
    duration: Floats
    gap: Floats
    room: tuple[int, ...]
    by_stage: bool = False

    @classmethod
    def of(
        cls,
        placement: Placement,
        num_microbatches: int,
        costs: Durations,
        room: tuple[int, ...],
        by_stage: bool = False,
    ) -> ExactProblem:
        """The ops of a split backward with their dependencies."""
        ops = tuple(
            Op(stage, kind, microbatch)
            for stage in range(len(placement))
            for kind in _KINDS
            for microbatch in range(num_microbatches)
        )
        number = {op: index for index, op in enumerate(ops)}
        duration = np.array([costs.duration(op) for op in ops], dtype=float)
        gap = np.full((len(ops), len(ops)), NEVER)
        for b, op in enumerate(ops):
            for needed in dependencies(op, len(placement) - 1, number):
                a = number[needed]
                hops = placement[needed.stage] != placement[op.stage]
                gap[a, b] = duration[a] + (costs.delay(needed, op) if hops else 0.0)
            if op.microbatch:
                gap[b - 1, b] = duration[b - 1]
            rank = placement[op.stage]
            freed = op.microbatch - room[rank]
            if op.kind is Kind.FORWARD and placement.count(rank) == 1 and freed >= 0:
                # The only stage of its rank: memory is a plain dependency.
                a = number[Op(op.stage, Kind.BACKWARD_WEIGHT, freed)]
                gap[a, b] = duration[a]
        return cls(ops, tuple(placement[op.stage] for op in ops), duration, gap, room, by_stage)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ops of each rank; the first is its first forward, which all others need."""
        return tuple(
            tuple(n for n, rank in enumerate(self.rank) if rank == mine)
            for mine in range(len(self.room))
        )

    @cached_property
    def stages_per_rank(self) -> tuple[int, ...]:
        """How many stages each rank has."""
        return tuple(len({self.ops[n].stage for n in numbers}) for numbers in self.members)

    @cached_property
    def durations(self) -> list[float]:
        """``duration`` as plain numbers, for loops."""
        return [float(taken) for taken in self.duration]

    @cached_property
    def needs(self) -> tuple[Gaps, ...]:
        """For each op, the ops it needs, and how long after their starts it can start."""
        return _gaps(self.gap.T)


def objective_of(problem: ExactProblem, order: Order) -> float:
    """The objective if every op runs as early as the order lets it; infinite if it deadlocks."""
    before = {b: a for numbers in order for a, b in pairwise(numbers)}
    start: dict[int, float] = {}
    position = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, numbers in enumerate(order):
            while position[rank] < len(numbers):
                b = numbers[position[rank]]
                needs = problem.needs[b]
                if any(a not in start for a, _ in needs):
                    break
                free = start[before[b]] + problem.durations[before[b]] if b in before else 0.0
                start[b] = max([free, *(start[a] + gap for a, gap in needs)])
                position[rank] += 1
                moved = True
    if len(start) < len(problem.ops):
        return float("inf")
    begins = [start[numbers[0]] if problem.by_stage else 0.0 for numbers in order]
    ends = [start[numbers[-1]] + problem.durations[numbers[-1]] for numbers in order]
    return float(max(end - begin for begin, end in zip(begins, ends, strict=True)))


def _gaps(rows: Floats) -> tuple[Gaps, ...]:
    return tuple(
        tuple((int(n), float(row[n])) for n in np.flatnonzero(row > NEVER)) for row in rows
    )


class StartWindows:
    """When each op can run, and what that says about the objective.

    Attributes:
        far: the longest path from the start of a to the start of b; −∞ where there is none.
        head: the earliest start of each op.
        tail: by how much the objective exceeds each op's end, at least; negative where ranks count
            from their own first start.
        possible: whether no op comes before itself.
    """

    def __init__(self, problem: ExactProblem, gap: Floats) -> None:
        far = gap.copy()
        np.fill_diagonal(far, 0.0)
        for via in range(len(far)):
            np.maximum(far, far[:, via : via + 1] + far[via : via + 1, :], out=far)
        both = (far > NEVER) & (far.T > NEVER)
        self.possible = int(both.sum()) == len(far)
        self.far: Floats = far
        self.head: Floats = far.max(axis=0)
        begin = np.zeros(len(problem.ops))
        if problem.by_stage:
            # A rank's first forward needs nothing but the first forwards of the ranks before it,
            # so that it starts as early in every order.
            begin = np.array([self.head[problem.members[rank][0]] for rank in problem.rank])
        self.tail: Floats = (far + problem.duration - begin).max(axis=1) - problem.duration

    def lower_bound(self, problem: ExactProblem) -> float:
        """Jackson's one-machine bound: the first of any ops of one rank starts no earlier than
        their least head, and behind the last comes no less than their least tail."""
        bound = float((self.head + problem.duration + self.tail).max())
        for numbers in map(list, problem.members):
            head, duration, tail = (x[numbers] for x in (self.head, problem.duration, self.tail))
            for least in np.unique(head):
                by_tail = np.argsort(-np.where(head >= least, tail, NEVER))
                by_tail = by_tail[: int((head >= least).sum())]
                work = np.cumsum(duration[by_tail])
                bound = max(bound, float((least + work + tail[by_tail]).max()))
        return bound

    def is_open(self, a: int, b: int) -> bool:
        """Whether either of two ops may come first."""
        return bool(self.far[a, b] == NEVER and self.far[b, a] == NEVER)


Solver = Callable[["LinearProgram", float, float], tuple[str, float, Floats]]
"""From a program, a time limit in seconds and a relative precision: "optimal", "infeasible" or why
neither is known; the objective; the value of every column."""

_SCALE = 1000.0
"""The highest objective, as the solver has it, whose tolerances are absolute."""
_ANSWERS = {0: "optimal", 2: "infeasible"}
_INFEASIBLE_OR_UNBOUNDED = 4


class LinearProgram:
    """Rows of terms that come to something at least, in the form that scipy takes. Columns are the
    starts, the binaries (1: the first of the two ops comes first), and the objective.

    Args:
        gap: its gaps, and those of the orders that are known to be best.
        windows: what follows from them.
        bounds: the objective is no less than the first, and wanted no more than the second.
    """

    def __init__(
        self, problem: ExactProblem, gap: Floats, windows: StartWindows, bounds: tuple[float, float]
    ) -> None:
        least, most = bounds
        self.unit = most / _SCALE
        self.problem, self.windows = problem, windows
        self.duration = problem.duration / self.unit
        self.head, self.tail = windows.head / self.unit, windows.tail / self.unit
        self.latest_end = _SCALE - self.tail
        pairs = [
            pair
            for numbers in problem.members
            for pair in combinations(numbers, 2)
            if windows.is_open(*pair)
        ]
        starts = len(problem.ops)
        self.binary = {pair: starts + index for index, pair in enumerate(pairs)}
        self.objective = starts + len(pairs)
        self.row: list[int] = []
        self.column: list[int] = []
        self.factor: list[float] = []
        self.at_least: list[float] = []
        self._times(gap / self.unit)
        for numbers, room in zip(problem.members, problem.room, strict=True):
            self._crowding(numbers)
            self._transitivity(numbers)
            self._memory(numbers, room)
        zeros, ones = np.zeros(len(pairs)), np.ones(len(pairs))
        latest = np.maximum(self.latest_end - self.duration, self.head)
        self.lowest = np.concatenate([self.head, zeros, [least / self.unit]])
        self.highest = np.concatenate([latest, ones, [_SCALE]])
        self.is_binary = np.concatenate([np.zeros(starts), ones, [0.0]])

    def before(self, a: int, b: int) -> tuple[float, dict[int, float]]:
        """1 if a comes before b, else 0: as a constant and terms."""
        if self.windows.far[a, b] > NEVER:
            return 1.0, {}
        if self.windows.far[b, a] > NEVER:
            return 0.0, {}
        if (a, b) in self.binary:
            return 0.0, {self.binary[a, b]: 1.0}
        return 1.0, {self.binary[b, a]: -1.0}

    def first_of(self, b: int, values: Floats) -> set[int]:
        """The ops of b's rank that come before b by the binaries' values."""
        first = set()
        for a in self.problem.members[self.problem.rank[b]]:
            surely, terms = self.before(a, b)
            if a != b and surely + sum(f * values[c] for c, f in terms.items()) > 0.5:
                first.add(a)
        return first

    def _add(self, terms: Mapping[int, float], at_least: float) -> None:
        self.row += [len(self.at_least)] * len(terms)
        self.column += terms.keys()
        self.factor += terms.values()
        self.at_least.append(at_least)

    def _times(self, gap: Floats) -> None:
        for a, b in zip(*map(np.ndarray.tolist, np.nonzero(gap > NEVER)), strict=True):
            self._add({b: 1.0, a: -1.0}, gap[a, b])
        for number, after in enumerate(self.duration + self.tail):
            self._add({self.objective: 1.0, number: -1.0}, after)
        for (a, b), binary in self.binary.items():
            # The usual big M, as small as the windows let it be: latest end, earliest start.
            much = self.latest_end[a] - self.head[b]
            self._add({b: 1.0, a: -1.0, binary: -much}, self.duration[a] - much)
            much = self.latest_end[b] - self.head[a]
            self._add({a: 1.0, b: -1.0, binary: much}, self.duration[b])

    def _crowding(self, numbers: tuple[int, ...]) -> None:
        """An op starts behind all work that comes before it on its rank, and all that comes after
        it runs before the end. Unlike big M, this holds something for fractions of binaries."""
        begin, end = self.head[list(numbers)].min(), self.tail[list(numbers)].min()
        for b in numbers:
            start, earliest = {b: 1.0}, begin
            rest, behind = {self.objective: 1.0, b: -1.0}, self.duration[b] + end
            for a in numbers:
                if a == b:
                    continue
                surely, terms = self.before(a, b)
                earliest += surely * self.duration[a]
                behind += (1 - surely) * self.duration[a]
                for column, factor in terms.items():
                    start[column] = -factor * self.duration[a]
                    rest[column] = factor * self.duration[a]
            self._add(start, earliest)
            self._add(rest, behind)

    def _transitivity(self, numbers: tuple[int, ...]) -> None:
        """One or two of a before b, b before c and c before a hold."""
        for a, b, c in combinations(numbers, 3):
            around = [self.before(*pair) for pair in ((a, b), (b, c), (c, a))]
            terms = {column: factor for _, part in around for column, factor in part.items()}
            if len(terms) > 1:
                surely = sum(constant for constant, _ in around)
                self._add(terms, 1 - surely)
                self._add({column: -factor for column, factor in terms.items()}, surely - 2)

    def _memory(self, numbers: tuple[int, ...], room: int) -> None:
        """At each forward of stages that share a rank: it, the forwards before it, less the W
        before it, fit the room."""
        ops = self.problem.ops
        if self.problem.stages_per_rank[self.problem.rank[numbers[0]]] == 1:
            return
        sign = {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 0.0, Kind.BACKWARD_WEIGHT: -1.0}
        for b in (n for n in numbers if ops[n].kind is Kind.FORWARD):
            held = 1.0
            left: dict[int, float] = {}
            for a in (n for n in numbers if n != b and sign[ops[n].kind]):
                surely, terms = self.before(a, b)
                held += sign[ops[a].kind] * surely
                left |= {column: -sign[ops[a].kind] * f for column, f in terms.items()}
            self._add(left, held - room)


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """HiGHS now and then writes a line of its own to standard output, past Python; there it would
    spoil what a program reads."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def load_solver() -> Solver:
    """HiGHS, as scipy brings it.

    Raises:
        InputError: scipy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        raise InputError(
            "optimal needs scipy, which is not installed; pip install 'penstock[search]'"
        ) from None

    def solve(
        program: LinearProgram, seconds: float, precision: float
    ) -> tuple[str, float, Floats]:
        shape = len(program.at_least), program.objective + 1
        matrix = coo_array((program.factor, (program.row, program.column)), shape=shape).tocsr()
        cost = np.zeros(shape[1])
        cost[program.objective] = 1.0
        deadline = monotonic() + seconds
        for presolve in (True, False):
            left = max(deadline - monotonic(), 0.001)
            with _nothing_printed():
                result = milp(
                    cost,
                    integrality=program.is_binary,
                    bounds=Bounds(program.lowest, program.highest),
                    constraints=LinearConstraint(matrix, np.array(program.at_least), np.inf),
                    options={"time_limit": left, "mip_rel_gap": precision, "presolve": presolve},
                )
            # Presolve may not know which of the two it is; the search does.
            if result.status != _INFEASIBLE_OR_UNBOUNDED:
                break
        answer = _ANSWERS.get(result.status, result.message)
        solved = answer == "optimal"
        values = result.x if solved else np.empty(0)
        return answer, result.fun * program.unit if solved else np.inf, values

    return solve
