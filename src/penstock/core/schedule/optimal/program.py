"""An ordering problem as a mixed-integer linear program, and HiGHS, which solves it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from time import monotonic

import numpy as np

from penstock.base.errors import InputError
from penstock.core.schedule.op import Kind
from penstock.core.schedule.optimal.problem import NEVER, ExactProblem, Floats, StartWindows

Solver = Callable[["LinearProgram", float, float], tuple[str, float, Floats]]
"""From a program, a time limit in seconds and a relative precision: "optimal", "infeasible" or why
neither is known; the objective; the value of every column."""

_SCALE = 1000.0
"""What the highest objective becomes in the solver, whose tolerances are absolute."""
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
