"""The steps of a rank: one class per kind of op, each bound to its stage, its channels, its unit.

A step is made once per segment and performed for every minibatch that has this segment; what
changes from one to the next is the ``RankWork`` that it is performed on. ``swapping`` has the steps
of stages and activations that come and go, ``on_trust`` those of weights that are not validated
yet.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.core.schedule import Kind, Op
from penstock.core.schedule.op import FORWARDS
from penstock.engine.model.replay import autocasting
from penstock.engine.run.rank.interpreter import Observers, RankStep
from penstock.engine.run.rank.program import SkipChannel
from penstock.engine.run.rank.protocols import UpdateProtocols
from penstock.engine.run.rank.updater import Updater
from penstock.engine.run.rank.work import RankWork
from penstock.engine.run.replicas import SharedState
from penstock.engine.stage.microbatch_graph import Gradients, InputGradients, Produced
from penstock.engine.stage.protocol import Keep, RunnableStage
from penstock.engine.transport import Edge
from penstock.engine.weights.store import WeightStore, refuse_autocast


@dataclass(frozen=True, slots=True)
class BoundStep:
    """A step, bound to all that it needs but the work at hand.

    Attributes:
        op: what the schedule calls it.
    """

    op: Op


@dataclass(frozen=True, slots=True)
class UnitStep(BoundStep):
    """A step that works on one microbatch, or slice of it.

    Attributes:
        unit: what it works on, from the beginning of the window.
    """

    unit: int


@dataclass(frozen=True, slots=True)
class Forward(UnitStep):
    """F: from a stage's input to its output, or to the loss.

    Attributes:
        stage: computes.
        keep: what the stage keeps for the backward.
        is_last: whether the stage is the pipeline's last.
        recalled, stashed: where skips come from and go.
        shared: what the forward must not write, if there is anything.
        store: has the weights, where there are several versions.
    """

    stage: RunnableStage
    keep: Keep
    is_last: bool
    recalled: tuple[SkipChannel, ...]
    stashed: tuple[SkipChannel, ...]
    shared: SharedState | None
    store: WeightStore | None

    def perform(self, work: RankWork) -> None:
        unit, stage = work.base_unit + self.unit, self.op.stage
        value = work.pending.values.pop((stage, unit)) if stage else work.input(unit, copied=False)
        skips = work.pending.skips(self.recalled, unit) if self.recalled else {}
        self.hand_on(work, unit, self.compute(work, unit, value, skips))

    def hand_on(self, work: RankWork, unit: int, produced: Produced) -> None:
        """Let what was made go where it is wanted."""
        if self.stashed:
            work.pending.hand_skips(self.stashed, unit, produced.skips)
        if not self.is_last:
            work.pending.values[self.op.stage + 1, unit] = produced.value

    def compute(self, work: RankWork, unit: int, value: Any, skips: dict[str, Any]) -> Produced:
        """Run the stage, and keep the loss or the output if it is the last one."""
        if self.shared is None and not work.minibatch.autocast:
            produced = self._run(work, unit, value, skips)
        else:
            shared = nullcontext() if self.shared is None else self.shared.unwritten(self.op.stage)
            with autocasting(work.minibatch.autocast), shared:
                if self.store is not None:
                    refuse_autocast(self.store)
                produced = self._run(work, unit, value, skips)
        if self.is_last:
            work.keep(unit, produced.value)
        return produced

    def _run(self, work: RankWork, unit: int, value: Any, skips: dict[str, Any]) -> Produced:
        criterion = work.criterion(unit) if self.is_last else None
        return self.stage.forward(
            unit, value, work.minibatch.step, criterion, self.keep, skips, work.position.first
        )


class UpdatesSoFar:
    """How many updates each stage of a rank has come to since its stream began, where there is one
    version of its weights, which every pass reads."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def begin(self) -> None:
        """A stream begins."""
        self._of.clear()

    def note(self, op: Op) -> int:
        """The version that an op reads; of an update, how many came before it."""
        version = self._of.get(op.stage, 0)
        if op.kind is Kind.UPDATE:
            self._of[op.stage] = version + 1
        return version


@dataclass(frozen=True, slots=True)
class Recompute(UnitStep):
    """R: run a forward again that had kept its input only."""

    stage: RunnableStage
    keep: Keep

    def perform(self, work: RankWork) -> None:
        self.stage.recompute(work.unit(self.unit), self.keep)


@dataclass(frozen=True, slots=True)
class _Back(UnitStep):
    """A step that makes the gradient of a stage's input.

    Attributes:
        stashed: where the gradients of the skips come from that the stage stashed.
        recalled: where those of the skips go that it recalled.
    """

    stage: RunnableStage
    is_last: bool
    stashed: tuple[SkipChannel, ...]
    recalled: tuple[SkipChannel, ...]
    updater: Updater

    def incoming(self, work: RankWork, unit: int) -> tuple[Gradients, dict[str, Gradients]]:
        """The gradients of the stage's output and of the skips that it stashed."""
        if not self.is_last:
            gradients = work.pending.gradients.pop((self.op.stage, unit))
            return gradients, work.pending.skips(self.stashed, unit) if self.stashed else {}
        # d(sum of weighted losses) / d(this loss) is its weight.
        scale = None if self.updater.loss_scale is None else self.updater.loss_scale.scale
        return [work.seed(unit, scale)], {}

    def pass_on(self, work: RankWork, unit: int, made: InputGradients) -> None:
        """Hand gradients to the stages before."""
        if self.op.stage > 0:
            work.pending.gradients[self.op.stage - 1, unit] = made.inputs
        if self.recalled:
            work.pending.hand_skips(self.recalled, unit, made.skips)


@dataclass(frozen=True, slots=True)
class Backward(_Back):
    """B: full backward."""

    def perform(self, work: RankWork) -> None:
        unit = work.base_unit + self.unit
        made = self.stage.backward(unit, *self.incoming(work, unit))
        self.updater.sums.gathered()
        self.pass_on(work, unit, made)


@dataclass(frozen=True, slots=True)
class BackwardInput(_Back):
    """I: the gradient of the input."""

    def perform(self, work: RankWork) -> None:
        unit = work.unit(self.unit)
        self.pass_on(work, unit, self.stage.backward_input(unit, *self.incoming(work, unit)))


@dataclass(frozen=True, slots=True)
class BackwardWeight(UnitStep):
    """W: the gradients of the weights, which I has put off."""

    stage: RunnableStage
    updater: Updater

    def perform(self, work: RankWork) -> None:
        self.stage.backward_weight(work.unit(self.unit))
        self.updater.sums.gathered()


@dataclass(frozen=True, slots=True)
class Send(UnitStep):
    """SEND_F, SEND_B: hand a stage's output, or the gradients of its input, to the rank that has
    the stage that needs them.

    Attributes:
        edge: on which it is sent.
        forward: whether it is an output.
        wanted_by: the stage that needs it.
    """

    edge: Edge
    forward: bool
    wanted_by: int

    def perform(self, work: RankWork) -> None:
        unit, pending = work.base_unit + self.unit, work.pending
        held = pending.values if self.forward else pending.gradients
        pending.send(self.edge, unit, held.pop((self.wanted_by, unit)))


@dataclass(frozen=True, slots=True)
class Receive(UnitStep):
    """RECV_F, RECV_B: wait for a stage's input, or the gradients of its output.

    Attributes:
        edge: on which it comes.
        waiting: what waits for what, for errors.
        forward: whether it is an input.
        wanted_by: the stage that needs it.
    """

    edge: Edge
    waiting: str
    forward: bool
    wanted_by: int

    def perform(self, work: RankWork) -> None:
        unit, pending = work.base_unit + self.unit, work.pending
        held = pending.values if self.forward else pending.gradients
        held[self.wanted_by, unit] = pending.receive(self.edge, unit, self.waiting)


@dataclass(frozen=True, slots=True)
class Freed(BoundStep):
    """FREE: the stage has freed it with the op that this one follows."""

    def perform(self, work: RankWork) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Reduce(BoundStep):
    """REDUCE: let others sum what they wait for."""

    updater: Updater

    def perform(self, work: RankWork) -> None:
        self.updater.sums.hand_in(self.op.stage)


@dataclass(frozen=True, slots=True)
class Agree(BoundStep):
    """AGREE before updates: wait for all ranks' norms, and clip or skip."""

    updates: UpdateProtocols

    def perform(self, work: RankWork) -> None:
        self.updates.now.agree()


@dataclass(frozen=True, slots=True)
class UpdateWeights(BoundStep):
    """UPDATE: step the stage's optimizer."""

    updates: UpdateProtocols

    def perform(self, work: RankWork) -> None:
        self.updates.now.update(self.op.stage)


@dataclass(frozen=True, slots=True)
class NewVersion(BoundStep):
    """UPDATE where weights have several versions: makes one; how many came before is noted."""

    updates: UpdateProtocols
    store: WeightStore

    def perform(self, work: RankWork) -> None:
        with self.store.updating(work.numbered(self.op)) as version:
            self.updates.now.update(self.op.stage)
        work.versions[self.op] = version
        work.updated(self.op.stage, version + 1)


@dataclass(frozen=True, slots=True)
class VersionCounted(BoundStep):
    """A step that reads or makes the one version of its stage's weights; which that is is noted."""

    step: RankStep[RankWork]
    updates: UpdatesSoFar

    def perform(self, work: RankWork) -> None:
        work.versions[self.op] = self.updates.note(self.op)
        self.step.perform(work)


@dataclass(frozen=True, slots=True)
class Checked(BoundStep):
    """A step on the way to new weights, before which nothing shared may have been written."""

    step: RankStep[RankWork]
    shared: SharedState

    def perform(self, work: RankWork) -> None:
        self.shared.check()
        self.step.perform(work)


@dataclass(frozen=True, slots=True)
class Closing(BoundStep):
    """The step that makes the last gradients of a stage; what it has made may leave meanwhile."""

    step: RankStep[RankWork]
    updater: Updater

    def perform(self, work: RankWork) -> None:
        with self.updater.sums.closing(self.op.stage):
            self.step.perform(work)


@dataclass(frozen=True, slots=True)
class Renewed(BoundStep):
    """The first step that reads the weights of a stage, of which other ranks update a part: what
    they have updated with the minibatch before is waited for here."""

    step: RankStep[RankWork]
    updater: Updater

    def perform(self, work: RankWork) -> None:
        self.updater.sums.take_back(self.op.stage)
        self.step.perform(work)


@dataclass(frozen=True, slots=True)
class Observed(UnitStep):
    """A compute step at which others look on."""

    step: RankStep[RankWork]
    observers: Observers

    def perform(self, work: RankWork) -> None:
        self.observers.watch(self.step, work, work.unit(self.unit))


@dataclass(frozen=True, slots=True)
class Versioned(UnitStep):
    """A compute step with the weights that the policy says; which they were is noted."""

    step: RankStep[RankWork]
    observers: Observers
    store: WeightStore

    def perform(self, work: RankWork) -> None:
        numbered = work.numbered(self.op)
        with self.store.reading(numbered) as version:
            instead = None
            if self.op.kind in FORWARDS:
                counts = self.observers.counts_memory
                instead = self.store.instead(numbered.microbatch, counts=counts)
            self.observers.watch(self.step, work, work.unit(self.unit), instead)
        work.versions[self.op] = version
