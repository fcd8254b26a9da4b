"""A worker: the stages of one rank, and one function per kind of op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from penstock import tree
from penstock.batch_norm import MinibatchStatistics
from penstock.errors import StageError
from penstock.replay import SavedBuffer, put_back, saved_buffers
from penstock.run.counting import Counter
from penstock.run.interpreter import Restart, perform_all, stage_error
from penstock.run.journal import Journal
from penstock.run.mail import Gradients, Mail
from penstock.run.minibatch import Harvest, Minibatch, autocast, modes
from penstock.run.program import Program, SkipRoute
from penstock.run.recipe import Recipe
from penstock.run.updater import Updater
from penstock.schedule import Kind, Op, Schedule
from penstock.schedule.op import COMPUTE
from penstock.stage import Criterion, InputGradients, Produced, Stage
from penstock.transport import Edge, Transport

_NUMBERS_PER_RUN = 1 << 20
_MOST_PROGRAMS = 64
_NOTHING = (Minibatch(0, ()), Harvest())


class Void(Enum):
    """Stands for a value that could not be computed with weights on trust; it can travel."""

    VOID = "void"


VOID = Void.VOID


class Worker:
    """Performs the ops of one rank.

    Args:
        rank: which.
        stages: the stages it holds, by number.
        transport: its end of the channels to other ranks.
        recipe: what to do with outputs and gradients.
        updater: applies the gradients of these stages.
        skips: values that travel beside the chain.

    Attributes:
        num_runs: minibatches completed.
        num_attempts: begun, whether completed or not; equal on all ranks between steps, since it
            numbers their messages.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        recipe: Recipe,
        updater: Updater,
        skips: Sequence[SkipRoute] = (),
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.transport = transport
        self.updater = updater
        self.num_runs = 0
        self._recipe = recipe
        self._skips = tuple(skips)
        self._modules = [layer.module for stage in stages.values() for layer in stage.layers]
        self._statistics: MinibatchStatistics | None = None
        if recipe.batch_norm == "minibatch":
            MinibatchStatistics(self._modules).close()  # refuses now what it would refuse later
        self._counter = Counter(stages) if recipe.count_memory else None
        self._programs: dict[int, Program] = {}
        self.num_attempts = 0
        self._journal = Journal()
        self._program: Program | None = None
        self._mail: Mail | None = None
        self._failed_on_trust: StageError | None = None
        self._minibatch, self._harvest = _NOTHING
        self._perform: dict[Kind, Callable[[Op], None]] = {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send,
            Kind.RECV_FORWARD: self._receive,
            Kind.SEND_BACKWARD: self._send,
            Kind.RECV_BACKWARD: self._receive,
            Kind.FREE_INPUT_PART: self._freed,
            Kind.FREE: self._freed,
            Kind.REDUCE: self._reduce,
            Kind.AGREE: self._agree,
            Kind.UPDATE: self._update,
        }

    @property
    def counts_memory(self) -> bool:
        """Whether its harvest tells what it held."""
        return self._counter is not None

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of op it can perform."""
        return frozenset(self._perform)

    def run(self, schedule: Schedule, minibatch: Minibatch) -> Harvest:
        """Perform this rank's ops of a lowered schedule on one minibatch.

        With targets, gradients are computed and accumulate in ``.grad``; without, none are.

        Raises:
            RunError: an op failed; telling the peers is the driver's part.
        """
        program = self._program = self.program(schedule)
        self._minibatch = minibatch
        modules = (module for layer in self._modules for module in layer.modules())
        buffers = saved_buffers(modules) if self.updater.pending else []
        gathers = self._recipe.batch_norm == "minibatch" and minibatch.targets
        try:
            # For the time of the step only: its hooks must not get into copies of the model.
            self._statistics = MinibatchStatistics(self._modules) if gathers else None
            with modes(minibatch):
                while True:
                    try:
                        return self._attempt(program)
                    except Restart:
                        self._start_again(buffers)
        except BaseException as error:
            error.add_note(self.dump())
            if minibatch.targets:
                # What was accumulated must not leak into the next minibatch's gradients.
                self.updater.drop_gradients()
            raise
        finally:
            self.forget()
            if self._statistics is not None:
                self._statistics.close()
                self._statistics = None

    def program(self, schedule: Schedule) -> Program:
        """This rank's part of a schedule, worked out once."""
        program = self._programs.get(id(schedule))
        if program is None or program.schedule is not schedule:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            program = self._programs[id(schedule)] = Program(schedule, self.rank, self._skips)
        return program

    def _attempt(self, program: Program) -> Harvest:
        number = self._next_number()
        self.updater.begin(number)
        self._mail = Mail(program, self.transport, number)
        harvest = self._harvest = Harvest(number=number)
        self._journal = Journal()
        if self._counter is not None:
            self._counter.begin()
        perform_all(program.ops, self, self._journal)
        harvest.records = self._journal.records
        if self._statistics is not None:
            self._statistics.commit()
        if not self._minibatch.more_follow:
            self.updater.settle()
        harvest.norm = self.updater.norm
        if self._counter is not None:
            harvest.peak = self._counter.peak(program.num_slices)
        self.num_runs += 1
        return harvest

    def _next_number(self) -> int:
        """What tells the messages of this attempt from all others, on every rank alike. Ranks that
        disagree on whether to train or to evaluate must not take each other's messages."""
        self.num_attempts += 1
        purpose = bool(self._minibatch.targets)
        return self.num_attempts * _NUMBERS_PER_RUN + purpose * (_NUMBERS_PER_RUN // 2)

    def dump(self) -> str:
        """This rank's last ops and what it does now; may be asked from any thread."""
        program = self._program
        return self._journal.text(self.rank, program.waiting if program else {})

    def _start_again(self, buffers: list[SavedBuffer]) -> None:
        """The weights that this minibatch has used so far were not to be: forget the attempt."""
        program, minibatch = self._program, self._minibatch
        self.forget()
        self._program, self._minibatch = program, minibatch
        self.transport.discard((self.num_attempts + 1) * _NUMBERS_PER_RUN)
        put_back(buffers)

    def forget(self) -> None:
        """Drop everything of the current minibatch, finished or not."""
        if self._statistics is not None:
            self._statistics.forget()
        if self._counter is not None:
            self._counter.forget()
        for stage in self.stages.values():
            stage.forget()
        self._program = self._mail = None
        self._failed_on_trust = None
        self._minibatch, self._harvest = _NOTHING

    def outgoing(self, schedule: Schedule) -> set[Edge]:
        """The edges on which others wait for this rank."""
        return self.program(schedule).outgoing() | self.updater.outgoing()

    def perform(self, op: Op) -> None:
        """Do what ``op`` says."""
        perform = self._perform[op.kind]
        if self._statistics is None and self._counter is None:
            perform(op)
        elif op.kind in COMPUTE or op.kind is Kind.RECOMPUTE:
            self._perform_observed(op, perform)
        else:
            perform(op)

    def _perform_observed(self, op: Op, perform: Callable[[Op], None]) -> None:
        with ExitStack() as stack:
            if self._statistics is not None and op.kind is not Kind.FORWARD:
                # What runs forward again counts no second time.
                stack.enter_context(self._statistics.paused())
            if self._counter is not None and op.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                stack.enter_context(self._counter.watching(op.stage, self._now.unit(op)))
            perform(op)
        if self._counter is not None:
            self._counter.after(op.stage, self._now.unit(op))

    @property
    def _now(self) -> Program:
        assert self._program is not None
        return self._program

    @property
    def _mails(self) -> Mail:
        assert self._mail is not None
        return self._mail

    def _forward(self, op: Op) -> None:
        mail, unit = self._mails, self._now.unit(op)
        value = self._input(unit) if op.stage == 0 else mail.value_for(op)
        on_trust = self.updater.pending or value is VOID
        compute = self._compute_on_trust if on_trust else self._compute
        produced = compute(op, value, mail.skips_for(op))
        mail.pass_skips(op, produced.skips)
        if op.stage < self._now.last_stage:
            mail.pass_value(op, produced.value)
        elif not self._minibatch.targets:
            self._harvest.outputs[unit] = produced.value

    def _compute(self, op: Op, value: Any, skips: dict[str, Any]) -> Produced:
        minibatch, program = self._minibatch, self._now
        stage, unit = key = op.stage, program.unit(op)
        with autocast(minibatch.autocast, enabled=True):
            produced = self.stages[stage].forward(
                unit,
                value,
                minibatch.step,
                self._criterion(stage, unit),
                program.keeps[key],
                skips,
            )
        if stage == program.last_stage and minibatch.targets:
            self._keep_loss(unit, produced.value)
        return produced

    def _compute_on_trust(self, op: Op, value: Any, skips: dict[str, Any]) -> Produced:
        """With weights that may not be allowed to stand. If these make it fail, others must get on
        to where the verdict is read, so something is handed on in place of the value."""
        nothing = Produced(VOID, dict.fromkeys((r.key for r in self._now.stashes[op.stage]), VOID))
        if any(given is VOID for given in (value, *skips.values())):
            return nothing
        try:
            return self._compute(op, value, skips)
        except Exception as error:  # whatever the user's code raises
            if self._failed_on_trust is None:
                self._failed_on_trust = stage_error(op, error)
            return nothing

    def _input(self, unit: int) -> Any:
        value = self._minibatch.inputs[unit]
        # The first layer may overwrite it, which must not show if the minibatch is begun anew.
        return tree.replace(Tensor, Tensor.clone, value) if self.updater.pending else value

    def _keep_loss(self, unit: int, loss: Tensor) -> None:
        # The mean of no terms is NaN, and counts for nothing.
        if self._recipe.stop_at_nan and self._minibatch.weights[unit] and not loss.is_cuda:
            value = loss.item()
            if not math.isfinite(value):
                raise ArithmeticError(
                    f"the loss is {value}; no weight has been updated with it. Lower the learning "
                    "rate, clip gradients, or look at this minibatch"
                )
        self._harvest.losses[unit] = loss

    def _criterion(self, stage: int, unit: int) -> Criterion | None:
        loss, metrics = self._recipe.loss, self._recipe.metrics
        if stage < self._now.last_stage or not self._minibatch.targets or loss is None:
            return None
        targets = self._minibatch.targets[unit]

        def criterion(outputs: Any) -> Tensor:
            if metrics:
                with torch.no_grad():
                    for name, metric in metrics.items():
                        measured = torch.as_tensor(metric(outputs, targets)).detach().clone()
                        self._harvest.metrics.setdefault(name, {})[unit] = measured
            return loss(outputs, targets)

        return criterion

    def _recompute(self, op: Op) -> None:
        stage, unit = key = op.stage, self._now.unit(op)
        self.stages[stage].recompute(unit, self._now.keeps_again[key])

    def _backward(self, op: Op) -> None:
        result = self.stages[op.stage].backward(self._now.unit(op), *self._incoming(op))
        self._pass_on(op, result)

    def _backward_input(self, op: Op) -> None:
        result = self.stages[op.stage].backward_input(self._now.unit(op), *self._incoming(op))
        self._pass_on(op, result)

    def _backward_weight(self, op: Op) -> None:
        self.stages[op.stage].backward_weight(self._now.unit(op))

    def _incoming(self, op: Op) -> tuple[Gradients, dict[str, Gradients]]:
        """The gradients of a stage's output and of the skips that it stashed."""
        mail = self._mails
        if op.stage < self._now.last_stage:
            return mail.gradients_for(op), mail.skip_gradients_for(op)
        unit = self._now.unit(op)
        # d(sum of weighted losses) / d(this loss) is the weight.
        weight = self._minibatch.weights[unit] * self._minibatch.share
        if not weight:
            return [None], {}
        seed = torch.full_like(self._harvest.losses[unit], weight)
        if self.updater.loss_scale is not None:
            seed *= self.updater.loss_scale.scale
        return [seed], {}

    def _pass_on(self, op: Op, result: InputGradients) -> None:
        self._mails.pass_gradients(op, result.inputs)
        self._mails.pass_skip_gradients(op, result.skips)

    def _send(self, op: Op) -> None:
        self._mails.send(op)

    def _receive(self, op: Op) -> None:
        self._mails.receive(op)

    def _freed(self, op: Op) -> None:
        """The stage has freed it with the op that this one follows."""

    def _reduce(self, op: Op) -> None:
        self.updater.hand_in(op.stage)

    def _agree(self, op: Op) -> None:
        """Before updates: wait for all ranks' norms. After them, in the next minibatch: see whether
        the updates stand."""
        if not self._recipe.post_validate:
            self.updater.agree()
        elif not self.updater.settle():
            raise Restart
        elif self._failed_on_trust is not None:
            raise self._failed_on_trust

    def _update(self, op: Op) -> None:
        self.updater.update(op.stage)
