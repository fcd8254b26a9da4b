"""The steps of a rank whose stages or activations come and go: to load, to evict, and those that
wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.schedule.op import BACKWARD, FORWARDS, RELEASING
from penstock.core.schedule.residence import StageResidency
from penstock.engine.run.rank.interpreter import Observers, RankStep
from penstock.engine.run.rank.protocols import DeferredUpdates, UpdateProtocols
from penstock.engine.run.rank.steps import BoundStep, UnitStep
from penstock.engine.run.rank.work import RankWork
from penstock.engine.stage.protocol import RunnableStage
from penstock.engine.weights.offload import Offloading
from penstock.engine.weights.residency import Residency


@dataclass(frozen=True, slots=True)
class LoadStage(BoundStep):
    """FETCH_F, FETCH_B: begin to bring a stage in."""

    stay: StageResidency
    residence: Residency

    def perform(self, work: RankWork) -> None:
        self.residence.fetch(self.op.stage, self.stay)


@dataclass(frozen=True, slots=True)
class EvictStage(BoundStep):
    """LEAVE_F, LEAVE_B: let a stage go.

    Attributes:
        noted_by: notes its gradients, if they are complete and all ranks will agree on them.
    """

    stay: StageResidency
    residence: Residency
    noted_by: DeferredUpdates | None

    def perform(self, work: RankWork) -> None:
        stage = self.op.stage
        if self.noted_by is not None:
            self.noted_by.note(stage, self.residence.parameters(stage))
        self.residence.leave(stage, self.stay)


@dataclass(frozen=True, slots=True)
class SwappedCompute(UnitStep):
    """A compute step of a stage that comes and goes: it waits for the weights, and autograd saves
    none of them."""

    step: RankStep[RankWork]
    observers: Observers
    residence: Residency
    offloading: Offloading | None

    def perform(self, work: RankWork) -> None:
        stage, unit = self.op.stage, work.unit(self.unit)
        waited = self.residence.arrive(stage)
        instead = None
        if self.op.kind in FORWARDS:
            instead = self.residence.instead(stage)
        else:
            waited = self.residence.begin_adding(stage) or waited
        if waited:
            work.waited()
        around = None if self.offloading is None else self.offloading.around((stage, unit))
        self.observers.watch(self.step, work, unit, instead, around)
        if self.op.kind in BACKWARD:
            self.residence.added(stage)


@dataclass(frozen=True, slots=True)
class SwappedUpdate(BoundStep):
    """UPDATE of a stage whose optimizer state comes and goes."""

    updates: UpdateProtocols
    residence: Residency

    def perform(self, work: RankWork) -> None:
        stage = self.op.stage
        if self.residence.arrive_with_state(stage):
            work.waited()
        self.updates.now.update(stage)
        self.residence.updated(stage)


@dataclass(frozen=True, slots=True)
class LateUpdate(BoundStep):
    """LATE_UPDATE: the update of the minibatch before, if it was deferred."""

    updates: DeferredUpdates

    def perform(self, work: RankWork) -> None:
        self.updates.apply(self.op.stage, work.waited)


@dataclass(frozen=True, slots=True)
class Stashing(UnitStep):
    """A forward whose activations will leave: autograd saves what can."""

    step: RankStep[RankWork]
    observers: Observers
    offloading: Offloading

    def perform(self, work: RankWork) -> None:
        unit = work.unit(self.unit)
        around = self.offloading.around((self.op.stage, unit))
        self.observers.watch(self.step, work, unit, around=around)


@dataclass(frozen=True, slots=True)
class LeaveStash(UnitStep):
    """LEAVE_S: let go what a microbatch keeps at a stage."""

    stage: RunnableStage
    offloading: Offloading
    observers: Observers

    def perform(self, work: RankWork) -> None:
        unit = work.unit(self.unit)
        modules = self.stage.layer_modules
        own = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
        self.offloading.leave((self.op.stage, unit), self.stage.held(unit), own)
        self.observers.count(self.op.stage, unit)


@dataclass(frozen=True, slots=True)
class FetchStash(UnitStep):
    """FETCH_S: begin to bring it back."""

    offloading: Offloading

    def perform(self, work: RankWork) -> None:
        self.offloading.fetch((self.op.stage, work.unit(self.unit)))


@dataclass(frozen=True, slots=True)
class Returned(UnitStep):
    """A backward whose activations have left: it waits until they are back."""

    step: RankStep[RankWork]
    offloading: Offloading

    def perform(self, work: RankWork) -> None:
        key = self.op.stage, work.unit(self.unit)
        if self.op.kind in BACKWARD and self.offloading.arrive(key):
            work.waited()
        self.step.perform(work)
        if self.op.kind in RELEASING:
            self.offloading.release(key)
