"""The question of a search: which ops on which rank, how long they take, what may be held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from penstock.base.errors import InputError
from penstock.base.values import one_of
from penstock.core.schedule.durations import Durations, Placement
from penstock.core.schedule.memory import Sizes
from penstock.core.schedule.op import Kind, Op, dependencies
from penstock.core.schedule.schedule import Schedule

Objective = Literal["makespan", "stage"]
OBJECTIVES: tuple[Objective, ...] = ("makespan", "stage")

Orders = list[list[int]]
"""The ops of each rank as numbers: ``OrderingProblem.number``."""

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, BACKWARD = range(4)
NUM_KINDS = 4
_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}

SLACK = 1e-9
"""Sums of parts such as 1/3 miss the whole by less than this."""


def check_objective(family: str, objective: str) -> None:
    """Raise ``InputError`` unless there is such an objective."""
    one_of(f"{family}: objective", objective, OBJECTIVES)


def whole_ranks(placement: Placement, kept_for_weight: float = 1.0) -> Sizes:
    """A microbatch keeps 1 at every rank, in equal parts at the rank's stages, and the given share
    of that from I until W."""
    whole = [1 / placement.count(rank) for rank in placement]
    return Sizes(whole, [kept_for_weight * share for share in whole])


@dataclass(frozen=True)
class OrderingProblem:
    """A pipeline to find an order for.

    Attributes:
        placement: the rank of each stage.
        num_microbatches: how many a minibatch has.
        durations: how long ops and messages take.
        sizes: what a microbatch keeps at each stage.
        limits: the most that each rank may hold at once, in the unit of the sizes.
        objective: ``"makespan"``, or ``"stage"`` for the longest time any rank needs from its
            first op to its last.
    """

    placement: Placement
    num_microbatches: int
    durations: Durations
    sizes: Sizes
    limits: tuple[float, ...]
    objective: Objective = "makespan"

    def __post_init__(self) -> None:
        for rank, stages in enumerate(self.stages_of):
            least = sum(self.sizes.activation[stage] for stage in stages)
            if self.limits[rank] + SLACK < least:
                raise InputError(
                    f"the limit of rank {rank} is {self.limits[rank]:g}, but one microbatch alone "
                    f"holds {least:g} there; allow at least that, or cut smaller microbatches"
                )

    @cached_property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """How many ranks."""
        return len(self.limits)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, ascending."""
        stages = range(self.num_stages)
        return tuple(
            tuple(stage for stage in stages if self.placement[stage] == rank)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def taken(self) -> tuple[tuple[float, ...], ...]:
        """``taken[kind][stage]``: how long an op takes."""
        return tuple(
            tuple(self.durations.duration(Op(stage, kind, 0)) for stage in range(self.num_stages))
            for kind in _KINDS
        )

    @cached_property
    def awaited(self) -> tuple[tuple[Op | None, ...], ...]:
        """``awaited[kind][stage]``: of what an op of microbatch 0 needs, the result that comes
        last; ``None`` where it needs nothing.

        What comes from another stage comes last: all else that an op needs is of its own rank and
        was there before that stage could begin.
        """
        present = {
            Op(stage, kind, 0) for stage in range(self.num_stages) for kind in _KINDS[:BACKWARD]
        }

        def last_needed(op: Op) -> Op | None:
            needed = dependencies(op, self.num_stages - 1, present)
            elsewhere = (other for other in needed if other.stage != op.stage)
            return next(elsewhere, needed[-1] if needed else None)

        return tuple(
            tuple(last_needed(Op(stage, kind, 0)) for stage in range(self.num_stages))
            for kind in _KINDS
        )

    @cached_property
    def followers(self) -> tuple[tuple[tuple[tuple[int, int, float], ...], ...], ...]:
        """``followers[kind][stage]``: the (kind, stage) whose awaited result an op gives, and how
        long that is under way; full backwards left out."""
        followers: list[list[list[tuple[int, int, float]]]] = [
            [[] for _ in range(self.num_stages)] for _ in range(BACKWARD)
        ]
        for kind, row in enumerate(self.awaited[:BACKWARD]):
            for stage, needed in enumerate(row):
                if needed is not None:
                    follower = kind, stage, self.delays[kind][stage]
                    followers[_CODES[needed.kind]][needed.stage].append(follower)
        return tuple(tuple(map(tuple, row)) for row in followers)

    @cached_property
    def delays(self) -> tuple[tuple[float, ...], ...]:
        """``delays[kind][stage]``: how long the awaited result is under way; 0 within a rank."""
        return tuple(
            tuple(
                self._delay(needed, Op(stage, kind, 0))
                for stage, needed in enumerate(self.awaited[code])
            )
            for code, kind in enumerate(_KINDS)
        )

    def _delay(self, needed: Op | None, op: Op) -> float:
        if needed is None or self.placement[needed.stage] == self.placement[op.stage]:
            return 0.0
        return self.durations.delay(needed, op)

    @cached_property
    def arcs(self) -> tuple[tuple[int, int, float, float], ...]:
        """For each stage and kind, as in ``number``: (from its number to the number of its result,
        from its number to that of the result it needs from another stage or 0, how long that is
        under way, how long the op takes). A full backward's result is a gradient, as that of its
        input half."""
        return tuple(
            self._arc(kind, stage) for stage in range(self.num_stages) for kind in range(NUM_KINDS)
        )

    def _arc(self, kind: int, stage: int) -> tuple[int, int, float, float]:
        result = BACKWARD_INPUT - BACKWARD if kind == BACKWARD else 0
        needed, offset = self.awaited[kind][stage], 0
        # What comes from the own stage is earlier in the rank's order.
        if needed is not None and needed.stage != stage:
            offset = self.number(_CODES[needed.kind], needed.stage, 0) - self.number(kind, stage, 0)
        return result, offset, self.delays[kind][stage], self.taken[kind][stage]

    @cached_property
    def least(self) -> float:
        """No order is better than this. Every rank does all its work; and while a stage runs the
        forwards and input gradients of all microbatches, the first of them has come to it through
        the stages before, and the last has yet to go back through them."""
        head = 0.0
        bounds: list[float] = []
        for stage in range(self.num_stages):
            stages = self.stages_of[self.placement[stage]]
            work = sum(taken[mine] for mine in stages for taken in self.taken[:BACKWARD])
            # The stage objective looks at no rank before its own first op.
            wait = head if self.objective == "makespan" else 0.0
            bounds += self._ways_through(stage, wait)
            if stage == stages[0]:
                bounds.append(wait + self.num_microbatches * work)
            if stage + 1 < self.num_stages:
                head += self.taken[FORWARD][stage] + self.delays[FORWARD][stage + 1]
        return max(bounds, default=0.0)

    def _ways_through(self, first: int, wait: float) -> Iterator[float]:
        """For each later stage, the least time until ``first`` is done, if that later stage is the
        narrow one."""
        forward, gradient, weight, _ = self.taken
        there = back = 0.0
        for stage in range(first, self.num_stages):
            narrow = self.num_microbatches * (forward[stage] + gradient[stage])
            yield wait + there + narrow + back + weight[first]
            if stage + 1 < self.num_stages:
                there += forward[stage] + self.delays[FORWARD][stage + 1]
                back += gradient[stage] + self.delays[BACKWARD_INPUT][stage]

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """An op as a number. One stage further is ``NUM_KINDS`` more."""
        return (microbatch * self.num_stages + stage) * NUM_KINDS + kind

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """The schedule with these orders."""

        def op(number: int) -> Op:
            rest, kind = divmod(number, NUM_KINDS)
            microbatch, stage = divmod(rest, self.num_stages)
            return Op(stage, _KINDS[kind], microbatch)

        return Schedule.of((map(op, order) for order in orders), name)

    def orders(self, schedule: Schedule) -> Orders:
        """The orders of a schedule with this placement."""
        return [
            [self.number(_CODES[op.kind], op.stage, op.microbatch) for op in ops]
            for ops in schedule.ranks
        ]

    def fits(self, rank: int, order: Sequence[int]) -> bool:
        """Whether a rank's order stays within its limit."""
        limit = self.limits[rank] + SLACK
        whole, kept = self.sizes.activation, self.sizes.kept_for_weight
        held = 0.0
        for number in order:
            kind, stage = number % NUM_KINDS, number // NUM_KINDS % self.num_stages
            if kind == FORWARD:
                held += whole[stage]
                if held > limit:
                    return False
            elif kind == BACKWARD_INPUT:
                held -= whole[stage] - kept[stage]
            elif kind == BACKWARD_WEIGHT:
                held -= kept[stage]
            else:
                held -= whole[stage]
        return True
