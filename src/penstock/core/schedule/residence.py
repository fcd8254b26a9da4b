"""Residence: when the weights of a stage are in memory, on ranks that cannot hold all of theirs.

A rank visits its stages one after the other. ``add_residence`` brings a stage in before each visit
and lets it go behind it, so that no more than two or three stages are in memory at once; this is
the spilled execution of Nagrecha and Kumar, "Hydra: A System for Large Multi-Model Deep Learning",
arXiv 2110.08633, section 4, written as ops that are checked, simulated and run like all others.

The rules by which memory is counted; the numbers stand at the lines below:

1. A fetch takes room for the weights at once. What an update comes late for takes room for the
   gradients and the optimizer state, too.
2. Gradients take room from the first backward on, until the update; so does optimizer state that an
   update behind the backwards needs, which comes while they run.
3. A stage that leaves unchanged gives back its room at once.
4. What has changed is written while the rank goes on: it keeps its room until the next leave. The
   state of a late update is written from then on, and gives its room back with the stage's leave.
5. A rank that ends with the stage with which it begins keeps its weights until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.base.errors import InputError, ScheduleError
from penstock.base.values import expect, whole
from penstock.core.schedule.op import COMPUTE, FETCHES, LEAVES, RESIDENCE, Kind, Op
from penstock.core.schedule.schedule import Schedule

UPDATES = frozenset({Kind.UPDATE, Kind.LATE_UPDATE})
"""Kinds that change weights."""
NEED_WEIGHTS = COMPUTE | UPDATES | {Kind.RECOMPUTE}
"""Kinds that a stage's weights must be in memory for."""
_GRADIENTS = frozenset({Kind.BACKWARD})
_MOST_AHEAD = 1000
PAGE = 4096
"""Whatever lies in a tier or a buffer begins and ends with pages: direct transfers need that."""


def whole_pages(num_bytes: int) -> int:
    """Bytes of the pages that hold so many."""
    return -(-num_bytes // PAGE) * PAGE


@dataclass(frozen=True)
class StageResidency:
    """A stay of a stage in memory, from a fetch to the leave that belongs to it.

    Attributes:
        stage: which.
        backward: whether backwards run.
        updates: whether the weights change behind them.
        late: whether the update of the minibatch before comes first.
        keeps: whether the weights stay behind the leave, because the rank begins with them again.
        needed_at: the place, among the rank's ops, of the first one that needs the weights.
        updated_at: that of the update behind the backwards, which needs the optimizer state.
    """

    stage: int
    backward: bool = False
    updates: bool = False
    late: bool = False
    keeps: bool = False
    needed_at: int = 0
    updated_at: int = 0

    @property
    def changes(self) -> bool:
        """Whether weights and optimizer state are others when the stage leaves."""
        return self.updates or self.late


@dataclass(frozen=True)
class StageBytes:
    """Bytes of each stage, by its number.

    Attributes:
        weights: all of its weights.
        gradients: of those that are trained.
        state: what the optimizer keeps.
    """

    weights: Sequence[int]
    gradients: Sequence[int]
    state: Sequence[int]


@dataclass
class _Visit:
    """Ops of a rank for which one stage is in memory: those from ``first`` up to ``last``, by
    their places among the rank's ops; ``begins`` is where the first visit of the rank begins of
    which it consists."""

    stage: int
    first: int
    last: int
    begins: int


def add_residence(
    schedule: Schedule, stages: Collection[int] | None = None, ahead: int = 1
) -> Schedule:
    """Bring stages into memory before they are needed, and let them go afterwards.

    A rank that returns to a stage within ``ahead`` visits keeps it. Apply this before
    ``add_communication``, and behind whatever adds updates.

    Args:
        schedule: with whole backwards; with updates, if it has any.
        stages: those that are not always in memory; all by default.
        ahead: how many visits before its own a stage begins to come: 1 is double buffering, 0 waits
            for each.

    Raises:
        InputError: a stage is not in the schedule, or ``ahead`` is no whole number ≥ 0.
        ScheduleError: backwards come in two halves, or an update stands apart from all backwards of
            its stage.
    """
    chosen = leaving_stages(schedule, stages, ahead)
    if RESIDENCE & schedule.kinds:
        raise ScheduleError("the schedule says already when stages are in memory; say it once")
    if schedule.splits_backward:
        raise ScheduleError(
            f"{schedule.name or 'the schedule'} splits backwards into I and W, and each would have "
            "to bring its weights in; take a schedule with whole backwards, such as spilled"
        )
    ranks = (_with_residence(ops, chosen, ahead) for ops in schedule.ranks)
    return Schedule.of(ranks, schedule.name)


def leaving_stages(
    schedule: Schedule, stages: Collection[int] | None, ahead: int, *, part: str = ""
) -> set[int]:
    """The stages that something of leaves memory: those given, or all.

    Args:
        ahead: how far ahead of its need it is fetched.
        part: what of them leaves, for errors, as in ``"activations"``; by default all.

    Raises:
        InputError: a stage is not in the schedule, or ``ahead`` is no whole number ≥ 0.
    """
    chosen = range(schedule.num_stages) if stages is None else stages
    those = f"the stages whose {part} leave" if part else "the stages that leave memory"
    expect(chosen, Collection, those, "give a list of their numbers")
    whole("ahead", ahead, 0, _MOST_AHEAD)
    absent = sorted(set(chosen) - set(range(schedule.num_stages)))
    if absent:
        stage = f"stage {absent[0]}"
        refused = f"{part} of {stage} cannot leave" if part else f"{stage} cannot leave memory"
        raise InputError(
            f"{refused}: the schedule has {schedule.num_stages} stages, numbered from 0"
        )
    return set(chosen)


def _with_residence(ops: Sequence[Op], chosen: Collection[int], ahead: int) -> Iterator[Op]:
    visits = list(_visits(ops))
    before: dict[int, list[Op]] = {}
    behind: dict[int, list[Op]] = {}
    for visit in _joined(visits, ahead):
        if visit.stage not in chosen:
            continue
        own = [op for op in ops[visit.first : visit.last + 1] if op.stage == visit.stage]
        backward = [op for op in own if op.kind in _GRADIENTS]
        if not backward and any(op.kind is Kind.UPDATE for op in own):
            raise ScheduleError(
                f"{own[-1]} stands apart from the backwards of stage {visit.stage}, which would "
                "have to come into memory once more for it; update behind the last backward"
            )
        kinds = (Kind.FETCH_FORWARD, Kind.LEAVE_FORWARD)
        if backward:
            kinds = (Kind.FETCH_BACKWARD, Kind.LEAVE_BACKWARD)
        named = backward or [op for op in own if op.kind is Kind.FORWARD]
        early = visits[max(0, visit.begins - ahead)]
        before.setdefault(early.first, []).append(named[0]._replace(kind=kinds[0]))
        behind[visit.last] = [named[-1]._replace(kind=kinds[1])]
    for place, op in enumerate(ops):
        yield from before.get(place, ())
        yield op
        yield from behind.get(place, ())


def _visits(ops: Sequence[Op]) -> Iterator[_Visit]:
    """The longest stretches in which a rank needs the weights of one stage."""
    visit: _Visit | None = None
    count = 0
    for place, op in enumerate(ops):
        if op.kind not in NEED_WEIGHTS:
            continue
        if visit is None or visit.stage != op.stage:
            if visit is not None:
                yield visit
            visit = _Visit(op.stage, place, place, count)
            count += 1
        visit.last = place
    if visit is not None:
        yield visit


def _joined(visits: Sequence[_Visit], ahead: int) -> list[_Visit]:
    """Visits, with those of one stage as one between which it would be fetched before it left."""
    latest: dict[int, tuple[int, _Visit]] = {}
    joined: list[_Visit] = []
    for number, visit in enumerate(visits):
        before = latest.get(visit.stage)
        if before is not None and number - before[0] <= ahead:
            before[1].last = visit.last
            latest[visit.stage] = number, before[1]
        else:
            own = _Visit(visit.stage, visit.first, visit.last, number)
            joined.append(own)
            latest[visit.stage] = number, own
    return joined


def stays_of(ops: Sequence[Op]) -> dict[Op, StageResidency]:
    """The stay that each fetch and each leave of a rank is for.

    Args:
        ops: those of one rank, with their fetches and leaves.

    Raises:
        ScheduleError: an op lacks its weights, or a fetch or leave has no partner.
    """
    spilled = {op.stage for op in ops if op.kind in RESIDENCE}
    needing = [op for op in ops if op.kind in NEED_WEIGHTS]
    ends = {needing[0].stage, needing[-1].stage} if needing else set()
    places = {op: place for place, op in enumerate(ops)}
    open_: dict[int, list[Op]] = {}
    stays: dict[Op, StageResidency] = {}
    for op in ops:
        there = open_.get(op.stage)
        if op.kind in FETCHES:
            if there is not None:
                raise ScheduleError(f"{op} fetches what is in memory since {there[0]}")
            open_[op.stage] = [op]
        elif op.kind in LEAVES:
            if there is None:
                raise ScheduleError(f"{op} lets a stage go that no fetch has brought in")
            where = {need.kind: places[need] for need in there}
            last = op.kind is Kind.LEAVE_BACKWARD and there[-1] == needing[-1]
            stays[there[0]] = stays[op] = StageResidency(
                op.stage,
                backward=bool(where.keys() & _GRADIENTS),
                updates=Kind.UPDATE in where,
                late=Kind.LATE_UPDATE in where,
                keeps=last and len(ends) == 1,
                needed_at=places[there[1]] if len(there) > 1 else places[op],
                updated_at=where.get(Kind.UPDATE, places[op]),
            )
            del open_[op.stage]
        elif op.kind in NEED_WEIGHTS and op.stage in spilled:
            if there is None:
                raise ScheduleError(
                    f"{op} lacks its weights: stage {op.stage} is not in memory; fetch it before, "
                    "as schedule.residence.add_residence does"
                )
            there.append(op)
    if open_:
        stage, there = next(iter(open_.items()))
        raise ScheduleError(f"stage {stage} never leaves behind {there[0]}; let it go at the end")
    return stays


def check_residence(schedule: Schedule) -> None:
    """Raise ``ScheduleError`` unless every op finds its weights in memory, where some leave it."""
    for rank, own in enumerate(schedule.rank_ops):
        if RESIDENCE & own.kinds:
            try:
                stays_of(own.as_tuple)
            except ScheduleError as error:
                raise ScheduleError(f"rank {rank}: {error}") from None


def resident_bytes(ops: Sequence[Op], sizes: StageBytes) -> list[int]:
    """How many bytes of stages that come and go a rank holds behind the beginning of each of its
    ops, once it has gone through them before.

    Args:
        ops: those of one rank, with their fetches and leaves.
        sizes: of all stages.
    """
    stays = stays_of(ops)
    account = _Account(sizes, stays)
    for op in ops:  # what is left of one minibatch is there when the next one begins
        account.perform(op)
    return [account.perform(op) for op in ops]


class _Account:
    def __init__(self, sizes: StageBytes, stays: Mapping[Op, StageResidency]) -> None:
        self._sizes = sizes
        self._stays = stays
        self._spilled = {stay.stage for stay in stays.values()}
        self._stay: dict[int, StageResidency] = {}
        self._weights: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        self._state: dict[int, int] = {}
        self._leaving = 0

    def perform(self, op: Op) -> int:
        """Go on by an op; how much is held once it has begun."""
        stage, sizes = op.stage, self._sizes
        if op.kind in FETCHES:
            stay = self._stay[stage] = self._stays[op]
            self._weights[stage] = sizes.weights[stage]  # [1]
            if stay.late:
                self._state[stage] = sizes.state[stage]
                self._gradients[stage] = sizes.gradients[stage]
        elif op.kind in _GRADIENTS and stage in self._spilled:
            self._gradients[stage] = sizes.gradients[stage]  # [2]
            if self._stay[stage].updates:
                self._state[stage] = sizes.state[stage]
        held = self._held
        if op.kind in UPDATES:
            self._gradients.pop(stage, None)
        elif op.kind in LEAVES:
            held = self._leave(self._stays[op])
        return held

    @property
    def _held(self) -> int:
        parts = (self._weights, self._gradients, self._state)
        return sum(sum(part.values()) for part in parts) + self._leaving

    def _leave(self, stay: StageResidency) -> int:
        self._leaving = 0
        weights = 0 if stay.keeps else self._weights.pop(stay.stage, 0)  # [5]
        if stay.changes:
            # [4]
            state = self._state.pop(stay.stage, 0)
            self._leaving = weights + (state if stay.updates else 0)
        self._leaving += self._gradients.pop(stay.stage, 0)
        return self._held  # [3]
