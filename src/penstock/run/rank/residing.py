"""The steps of a rank whose stages come and go: to fetch, to leave, and what waits for them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.run.rank.interpreter import RankStep
from penstock.run.rank.observers import Observers
from penstock.run.rank.updater import Updater
from penstock.run.rank.work import Work
from penstock.schedule import Op
from penstock.schedule.op import FORWARDS
from penstock.schedule.residence import Stay
from penstock.weights.residence import Residence


@dataclass(frozen=True, slots=True)
class Fetch:
    """FETCH_F, FETCH_B: begin to bring a stage in."""

    op: Op
    stay: Stay
    residence: Residence

    def perform(self, work: Work) -> None:
        self.residence.fetch(self.op.stage, self.stay)


@dataclass(frozen=True, slots=True)
class Leave:
    """LEAVE_F, LEAVE_B: let a stage go.

    Attributes:
        notes: whether its gradients are complete, and all ranks will agree on them.
    """

    op: Op
    stay: Stay
    residence: Residence
    updater: Updater
    notes: bool

    def perform(self, work: Work) -> None:
        stage = self.op.stage
        if self.notes:
            self.updater.note(stage, self.residence.parameters(stage))
        self.residence.leave(stage, self.stay)


@dataclass(frozen=True, slots=True)
class Resident:
    """A compute step of a stage that comes and goes: it waits for the weights, and autograd saves
    none of them."""

    op: Op
    unit: int
    step: RankStep[Work]
    observers: Observers
    residence: Residence

    def perform(self, work: Work) -> None:
        stage = self.op.stage
        self.residence.arrive(stage)
        instead = None
        if self.op.kind in FORWARDS:
            instead = self.residence.instead(stage)
        else:
            self.residence.begin_adding(stage)
        self.observers.watch(self.step, work, work.unit(self.unit), instead)


@dataclass(frozen=True, slots=True)
class ResidentUpdate:
    """UPDATE of a stage whose optimizer state comes and goes."""

    op: Op
    updater: Updater
    residence: Residence

    def perform(self, work: Work) -> None:
        stage = self.op.stage
        self.residence.arrive_with_state(stage)
        self.updater.update(stage)
        self.residence.updated(stage)


@dataclass(frozen=True, slots=True)
class LateUpdate:
    """LATE_UPDATE: the update of the minibatch before, if it is owed."""

    op: Op
    updater: Updater
    residence: Residence

    def perform(self, work: Work) -> None:
        pay(self.op.stage, self.updater, self.residence)


def pay(stage: int, updater: Updater, residence: Residence) -> None:
    """Make the update that a stage owes, if it does, while its weights are in memory."""
    if stage in updater.owed:
        residence.arrive_with_state(stage)
        residence.bring_gradients(stage)
        updater.update_late(stage)
        residence.updated(stage, late=True)
