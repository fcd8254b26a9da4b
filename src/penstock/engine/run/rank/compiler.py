"""From a rank's ops to steps: each is bound once per segment to what performs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.base.errors import InputError
from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.schedule.op import COMPUTE, RELEASING
from penstock.core.schedule.rounds import Segment
from penstock.engine.run.rank.interpreter import Observers, RankStep
from penstock.engine.run.rank.on_trust import ForwardOnTrust, Settle, UpdatesOnTrust
from penstock.engine.run.rank.program import RankProgram, SkipRoute
from penstock.engine.run.rank.protocols import (
    DeferredUpdates,
    FlushedUpdates,
    StreamedUpdates,
    UpdateProtocol,
    UpdateProtocols,
)
from penstock.engine.run.rank.steps import (
    Agree,
    Backward,
    BackwardInput,
    BackwardWeight,
    Checked,
    Closing,
    Forward,
    Freed,
    NewVersion,
    Observed,
    Receive,
    Recompute,
    Reduce,
    Renewed,
    Send,
    UpdatesSoFar,
    UpdateWeights,
    VersionCounted,
    Versioned,
)
from penstock.engine.run.rank.swapping import (
    EvictStage,
    FetchStash,
    LateUpdate,
    LeaveStash,
    LoadStage,
    Returned,
    Stashing,
    SwappedCompute,
    SwappedUpdate,
)
from penstock.engine.run.rank.updater import Updater
from penstock.engine.run.rank.work import RankWork
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.replicas import SharedState
from penstock.engine.stage.protocol import RunnableStage
from penstock.engine.weights.offload import Keep, Offloading
from penstock.engine.weights.residency import Residency
from penstock.engine.weights.store import WeightStore

_MOST_PROGRAMS = 64
_READING_WEIGHTS = COMPUTE | {Kind.RECOMPUTE}
_CHANGING_WEIGHTS = frozenset({Kind.REDUCE, Kind.AGREE, Kind.UPDATE, Kind.LATE_UPDATE})
_VERSIONED = _READING_WEIGHTS | {Kind.UPDATE}


@dataclass(frozen=True)
class RankExtras:
    """Things that a rank has beside stages and an updater, where its plan or model asks for them.

    Attributes:
        skips: values that travel beside the chain.
        stores: the versions of the weights of its stages, where there are several.
        shared: what others hold as well, so that no forward of this rank may write it.
        residence: which of its stages are in memory, if they come and go.
        offloading: makes what lets activations leave, of what counts their memory.
        shapes: by layer, what it was profiled with, for errors.
    """

    skips: Sequence[SkipRoute] = ()
    stores: Mapping[int, WeightStore] = field(default_factory=dict)
    shared: SharedState | None = None
    residence: Residency | None = None
    offloading: Callable[[Keep], Offloading] | None = None
    shapes: Mapping[str, str] = field(default_factory=dict)


NO_EXTRAS = RankExtras()


@dataclass(frozen=True)
class RankParts:
    """All that the steps of one rank are bound to, as long as it lives.

    Attributes:
        rank: that performs them.
        stages: of this rank, by number.
        updater: makes weights of gradients.
        updates: the protocol by which it does so.
        observers: look on while stages compute.
        skips: values that travel beside the chain.
        stores: the versions of the stages' weights, where there are several.
        shared: what others hold as well, so that no forward of this rank may write it.
        residence: which stages are in memory, if they come and go.
        offloading: lets activations leave, if any do.
        deferred: updates that wait for stages that come and go, if any do.
        so_far: counts updates where weights have one version and passes of several ages read it.
    """

    rank: int
    stages: Mapping[int, RunnableStage]
    updater: Updater
    updates: UpdateProtocols
    observers: Observers
    skips: Sequence[SkipRoute]
    stores: Mapping[int, WeightStore]
    shared: SharedState
    residence: Residency | None
    offloading: Offloading | None
    deferred: DeferredUpdates | None
    so_far: UpdatesSoFar | None

    @classmethod
    def of(
        cls,
        rank: int,
        stages: Mapping[int, RunnableStage],
        recipe: Recipe,
        updater: Updater,
        extras: RankExtras,
    ) -> RankParts:
        """The parts that follow from a recipe, and from what the rank has."""
        observers = Observers(stages, recipe)
        flushed: UpdateProtocol
        deferred = None
        if extras.residence is not None and recipe.needs_agreement:
            flushed = deferred = DeferredUpdates(updater, extras.residence)
        else:
            flushed = (UpdatesOnTrust if recipe.post_validate else FlushedUpdates)(updater)
        return cls(
            rank,
            stages,
            updater,
            UpdateProtocols(flushed, StreamedUpdates(updater)),
            observers,
            tuple(extras.skips),
            extras.stores,
            extras.shared or SharedState({}),
            extras.residence,
            None if extras.offloading is None else extras.offloading(observers.keep),
            deferred,
            UpdatesSoFar() if recipe.versions.activations == "newest" else None,
        )

    @property
    def on_trust(self) -> bool:
        """Whether updates are made before ranks agree."""
        return self.updater.recipe.post_validate


class Compiler:
    """Makes a rank's programs and steps, when the worker comes to a segment for the first time.

    Args:
        parts: what steps are bound to.
    """

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts
        self.program = lru_cache(_MOST_PROGRAMS)(self._program)
        self.steps = lru_cache(_MOST_PROGRAMS)(self._steps)

    def _program(self, segment: Segment) -> RankProgram:
        """This rank's part of a segment.

        Raises:
            InputError: copies that divide experts would not do the same.
        """
        for stage, ranks in self._parts.updater.sums.expert_homes.items():
            _check_copies(segment.schedule, stage, ranks)
        return RankProgram(segment, self._parts.rank, self._parts.skips)

    def _steps(self, segment: Segment, trains: bool) -> tuple[RankStep[RankWork], ...]:
        """The steps of a segment; one that only evaluates reads the newest weights."""
        stores = self._parts.stores if trains else {}
        return _Binder(self._parts, self.program(segment), stores).steps()


class _Binder:
    """Binds the ops of one segment, each to what performs it.

    Args:
        parts: what steps are bound to.
        program: the rank's part of the segment.
        stores: the versions of the weights that it reads, where there are several.
    """

    def __init__(
        self, parts: RankParts, program: RankProgram, stores: Mapping[int, WeightStore]
    ) -> None:
        self._parts = parts
        self._program = program
        self._stores = stores

    def steps(self) -> tuple[RankStep[RankWork], ...]:
        """A step for each op, in order."""
        closing, renewed = self._closing(), self._renewed()
        steps = []
        for op in self._program.ops:
            step = self._bound(op)
            if op in closing:
                step = Closing(op, step, self._parts.updater)
            steps.append(Renewed(op, step, self._parts.updater) if op in renewed else step)
        return tuple(steps)

    def _renewed(self) -> set[Op]:
        """The first op that reads each stage's weights, where others update a part of them."""
        first: dict[int, Op] = {}
        for op in self._program.ops if self._parts.updater.sums.has_shards else ():
            if op.kind in _READING_WEIGHTS:
                first.setdefault(op.stage, op)
        return {*first.values()}

    def _closing(self) -> set[Op]:
        """The ops that make the last gradients before they are handed in, of stages whose gradients
        may leave earlier."""
        closing, last = set(), {}
        for op in self._program.ops:
            if op.kind in RELEASING:
                last[op.stage] = op
            elif op.kind is Kind.REDUCE and self._parts.updater.sums.leaves_early(op.stage):
                closing |= {last[op.stage]} if op.stage in last else set()
        return closing

    def _bound(self, op: Op) -> RankStep[RankWork]:
        step = self._checked(op)
        if self._leaves(op) and op.kind is not Kind.FORWARD:
            assert self._parts.offloading is not None
            return Returned(op, self._program.unit(op), step, self._parts.offloading)
        if self._parts.so_far is not None and op.kind in _VERSIONED:
            return VersionCounted(op, step, self._parts.so_far)
        return step

    def _checked(self, op: Op) -> RankStep[RankWork]:
        step, store = _BINDINGS[op.kind](self, op), self._stores.get(op.stage)
        stashes = op.kind is Kind.FORWARD and self._leaves(op)
        offloading = self._parts.offloading if stashes else None
        if self._parts.residence is not None and op.kind in _READING_WEIGHTS:
            unit, observers = self._program.unit(op), self._parts.observers
            return SwappedCompute(op, unit, step, observers, self._parts.residence, offloading)
        if offloading is not None:
            return Stashing(op, self._program.unit(op), step, self._parts.observers, offloading)
        if op.kind in _READING_WEIGHTS:
            if store is not None:
                return Versioned(op, self._program.unit(op), step, self._parts.observers, store)
            if self._parts.observers.look_on(op.kind):
                return Observed(op, self._program.unit(op), step, self._parts.observers)
        return Checked(op, step, self._parts.shared) if op.kind in _CHANGING_WEIGHTS else step

    def _leaves(self, op: Op) -> bool:
        """Whether an op is of a microbatch whose activations leave."""
        return op.kind in COMPUTE and (op.stage, self._program.unit(op)) in self._program.offloaded

    def _forward(self, op: Op) -> RankStep[RankWork]:
        unit, parts = self._program.unit(op), self._parts
        bound = (
            op,
            unit,
            parts.stages[op.stage],
            self._program.keeps[op.stage, unit],
            op.stage == self._program.last_stage,
            self._program.arriving(op),
            self._program.leaving(op),
            parts.shared if parts.shared.watches(op.stage) else None,
            self._stores.get(op.stage),
        )
        return ForwardOnTrust(*bound, parts.updates) if parts.on_trust else Forward(*bound)

    def _backward(self, op: Op) -> RankStep[RankWork]:
        kind = Backward if op.kind is Kind.BACKWARD else BackwardInput
        return kind(
            op,
            self._program.unit(op),
            self._parts.stages[op.stage],
            op.stage == self._program.last_stage,
            self._program.arriving(op),
            self._program.leaving(op),
            self._parts.updater,
        )

    def _backward_weight(self, op: Op) -> RankStep[RankWork]:
        return BackwardWeight(
            op, self._program.unit(op), self._parts.stages[op.stage], self._parts.updater
        )

    def _recompute(self, op: Op) -> RankStep[RankWork]:
        unit = self._program.unit(op)
        return Recompute(
            op, unit, self._parts.stages[op.stage], self._program.keeps_again[op.stage, unit]
        )

    def _send(self, op: Op) -> RankStep[RankWork]:
        forward = op.kind is Kind.SEND_FORWARD
        wanted_by = op.stage + 1 if forward else op.stage - 1
        return Send(op, self._program.unit(op), self._program.edges[op], forward, wanted_by)

    def _receive(self, op: Op) -> RankStep[RankWork]:
        edge, waiting = self._program.edges[op], self._program.waiting[op]
        forward = op.kind is Kind.RECV_FORWARD
        return Receive(op, self._program.unit(op), edge, waiting, forward, op.stage)

    def _freed(self, op: Op) -> RankStep[RankWork]:
        return Freed(op)

    def _reduce(self, op: Op) -> RankStep[RankWork]:
        return Reduce(op, self._parts.updater)

    def _agreement(self, op: Op) -> RankStep[RankWork]:
        agree = Settle if self._parts.on_trust else Agree
        return agree(op, self._parts.updates)

    def _update(self, op: Op) -> RankStep[RankWork]:
        updates, residence = self._parts.updates, self._parts.residence
        store = self._stores.get(op.stage)
        if store is not None:
            return NewVersion(op, updates, store)
        if residence is not None:
            return SwappedUpdate(op, updates, residence)
        return UpdateWeights(op, updates)

    def _late_update(self, op: Op) -> RankStep[RankWork]:
        assert self._parts.deferred is not None
        return LateUpdate(op, self._parts.deferred)

    def _fetch(self, op: Op) -> RankStep[RankWork]:
        assert self._parts.residence is not None
        return LoadStage(op, self._program.stays[op], self._parts.residence)

    def _leave(self, op: Op) -> RankStep[RankWork]:
        assert self._parts.residence is not None
        noted_by = self._parts.deferred if op in self._program.last_leaves else None
        return EvictStage(op, self._program.stays[op], self._parts.residence, noted_by)

    def _leave_stash(self, op: Op) -> RankStep[RankWork]:
        assert self._parts.offloading is not None
        unit, stage = self._program.unit(op), self._parts.stages[op.stage]
        return LeaveStash(op, unit, stage, self._parts.offloading, self._parts.observers)

    def _fetch_stash(self, op: Op) -> RankStep[RankWork]:
        assert self._parts.offloading is not None
        return FetchStash(op, self._program.unit(op), self._parts.offloading)


_Binding = Callable[[_Binder, Op], RankStep[RankWork]]

_BINDINGS: Mapping[Kind, _Binding] = {
    Kind.FORWARD: _Binder._forward,
    Kind.RECOMPUTE: _Binder._recompute,
    Kind.BACKWARD: _Binder._backward,
    Kind.BACKWARD_INPUT: _Binder._backward,
    Kind.BACKWARD_WEIGHT: _Binder._backward_weight,
    Kind.SEND_FORWARD: _Binder._send,
    Kind.RECV_FORWARD: _Binder._receive,
    Kind.SEND_BACKWARD: _Binder._send,
    Kind.RECV_BACKWARD: _Binder._receive,
    Kind.FREE_INPUT_PART: _Binder._freed,
    Kind.FREE: _Binder._freed,
    Kind.REDUCE: _Binder._reduce,
    Kind.AGREE: _Binder._agreement,
    Kind.UPDATE: _Binder._update,
    Kind.LATE_UPDATE: _Binder._late_update,
    Kind.FETCH_FORWARD: _Binder._fetch,
    Kind.FETCH_BACKWARD: _Binder._fetch,
    Kind.LEAVE_FORWARD: _Binder._leave,
    Kind.LEAVE_BACKWARD: _Binder._leave,
    Kind.LEAVE_STASH: _Binder._leave_stash,
    Kind.FETCH_STASH: _Binder._fetch_stash,
}
KINDS = frozenset(_BINDINGS)
"""The kinds of op that a rank can perform."""


def _check_copies(schedule: Schedule, stage: int, ranks: Sequence[int]) -> None:
    """Raise ``InputError`` unless all copies of a stage compute the same in the same order."""
    orders = [
        [(op.kind, op.stage) for op in schedule.ranks[rank] if op.kind in _READING_WEIGHTS]
        for rank in ranks
    ]
    if any(order != orders[0] for order in orders):
        raise InputError(
            f"stage {stage} has {len(ranks)} copies that divide its experts, and they do not have "
            "as many microbatches of this minibatch; give a number of rows that makes a multiple "
            f"of {len(ranks)} microbatches, or take expert_ranks=1"
        )
