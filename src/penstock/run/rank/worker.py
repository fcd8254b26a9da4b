"""A worker: the stages of one rank, and one function per kind of op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from penstock.errors import StageError
from penstock.model.replay import SavedBuffer, put_back, saved_buffers
from penstock.run.minibatch import Harvest, Minibatch, autocast, modes
from penstock.run.rank.at_hand import AtHand
from penstock.run.rank.interpreter import Restart, perform_all, stage_error
from penstock.run.rank.journal import Journal
from penstock.run.rank.mail import Gradients, Mail
from penstock.run.rank.observers import Observers
from penstock.run.rank.program import Program, SkipRoute
from penstock.run.rank.updater import Updater
from penstock.run.recipe import Recipe
from penstock.run.shared_state import SharedState
from penstock.schedule import Kind, Op
from penstock.schedule.op import COMPUTE
from penstock.schedule.segment import Segment
from penstock.stage.stage import InputGradients, Produced, Stage
from penstock.transport import Edge, Transport
from penstock.weights.store import WeightStore, refuse_autocast

_CHANGING_WEIGHTS = frozenset({Kind.REDUCE, Kind.AGREE, Kind.UPDATE})
NUMBERS_PER_RUN = 1 << 32
_MOST_PROGRAMS = 64
_NOTHING = Minibatch(0, ())


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
        stores: the versions of the weights of its stages, where there are several.
        shared: what others hold as well, so that no forward of this rank may write it.

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
        stores: Mapping[int, WeightStore] = MappingProxyType({}),
        shared: SharedState | None = None,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.transport = transport
        self.updater = updater
        self.num_runs = 0
        self._recipe = recipe
        self._skips = tuple(skips)
        self._stores = stores
        self._shared = shared or SharedState({})
        self._observers = Observers(stages, recipe)
        self._programs: dict[int, Program] = {}
        self.num_attempts = 0
        self._journal = Journal()
        self._program: Program | None = None
        self._mail: Mail | None = None
        self._failed_on_trust: StageError | None = None
        self._hand = AtHand(_NOTHING, recipe)
        self._number = 0
        self._versions: dict[Op, int] = {}
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
        return self._observers.counts_memory

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of op it can perform."""
        return frozenset(self._perform)

    def run(self, segment: Segment, minibatch: Minibatch) -> Harvest:
        """Perform this rank's ops of a lowered schedule on one minibatch.

        With targets, gradients are computed and accumulate in ``.grad``; without, none are.

        Raises:
            RunError: an op failed; telling the peers is the driver's part.
        """
        program = self._program = self.program(segment)
        buffers = saved_buffers(self._observers.modules) if self.updater.pending else []
        ends = True
        try:
            self._observers.attend(minibatch)
            with modes(minibatch):
                while True:
                    try:
                        harvest = self._attempt(program, minibatch)
                    except Restart:
                        self._start_again(buffers)
                    else:
                        ends = segment.ends
                        return harvest
        except BaseException as error:
            error.add_note(self.dump())
            if minibatch.trains:
                # What was accumulated must not leak into the next minibatch's gradients.
                self.updater.drop_gradients()
            raise
        finally:
            if ends:
                self.forget()
            self._observers.leave()

    def program(self, segment: Segment) -> Program:
        """This rank's part of a segment, worked out once."""
        program = self._programs.get(id(segment))
        if program is None or program.segment is not segment:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            program = self._programs[id(segment)] = Program(segment, self.rank, self._skips)
        return program

    def _attempt(self, program: Program, minibatch: Minibatch) -> Harvest:
        if program.segment.begins:
            self._begin(program, minibatch)
        # Segments of one stream take up each other's messages, but each has results of its own.
        self._hand = AtHand(minibatch, self._recipe, self._number + minibatch.index)
        self._mails.turn_to(program, minibatch.base * program.num_slices)
        for store in self._stores.values():
            store.synchronous = minibatch.synchronous
            if minibatch.inputs:
                store.extend(minibatch.first + minibatch.num_microbatches)
        self._journal = Journal()
        self._versions = {}
        self._shared.begin()
        perform_all(program.ops, self, self._journal, minibatch.base)
        self._shared.check()
        return self._harvested(program, minibatch)

    def _begin(self, program: Program, minibatch: Minibatch) -> None:
        self._number = self.next_number()
        self.updater.begin(self._number, asynchronous=not minibatch.synchronous)
        self._mail = Mail(program, self.transport, self._number)
        if minibatch.trains:
            for store in self._stores.values():
                store.begin()
        self._observers.begin()

    def _harvested(self, program: Program, minibatch: Minibatch) -> Harvest:
        harvest = self._hand.harvest
        harvest.records = self._journal.records
        if self._stores and minibatch.trains:
            harvest.versions = [self._versions.get(op, -1) for op in program.ops]
            harvest.held = max(store.most for store in self._stores.values())
        self._observers.commit()
        if not minibatch.more_follow:
            self.updater.settle()
        harvest.norm = self.updater.norm
        harvest.peak = self._observers.peak(program.num_slices)
        self.num_runs += 1
        return harvest

    def next_number(self) -> int:
        """What tells the messages of this attempt from all others, on every rank alike; those of
        the next one are ``NUMBERS_PER_RUN`` higher."""
        self.num_attempts += 1
        return self.num_attempts * NUMBERS_PER_RUN

    def dump(self) -> str:
        """This rank's last ops and what it does now; may be asked from any thread."""
        program = self._program
        return self._journal.text(self.rank, program.waiting if program else {})

    def _start_again(self, buffers: list[SavedBuffer]) -> None:
        """The weights that this minibatch has used so far were not to be: forget the attempt."""
        program = self._program
        self.forget()
        self._program = program
        self.transport.discard((self.num_attempts + 1) * NUMBERS_PER_RUN)
        put_back(buffers)

    def forget(self) -> None:
        """Drop everything of the current minibatch, finished or not."""
        self._observers.forget()
        for stage in self.stages.values():
            stage.forget()
        self._program = self._mail = None
        self._failed_on_trust = None
        self._hand = AtHand(_NOTHING, self._recipe)

    def outgoing(self, segment: Segment) -> set[Edge]:
        """The edges on which others wait for this rank."""
        return self.program(segment).outgoing() | self.updater.sums.outgoing()

    def perform(self, op: Op) -> None:
        """Do what ``op`` says."""
        perform = self._perform[op.kind]
        if op.kind in _CHANGING_WEIGHTS:
            self._shared.check()
        store = self._store(op)
        if store is not None:
            self._perform_versioned(op, store, perform)
        elif op.kind in COMPUTE or op.kind is Kind.RECOMPUTE:
            self._observers.watch(op, self._unit(op), perform, None)
        else:
            perform(op)

    def _store(self, op: Op) -> WeightStore | None:
        """Where the weights are that an op reads or makes, if there are several versions."""
        if not self._stores or not self._hand.minibatch.trains:
            return None
        touches = op.kind in COMPUTE or op.kind in (Kind.RECOMPUTE, Kind.UPDATE)
        return self._stores.get(op.stage) if touches else None

    def _perform_versioned(self, op: Op, store: WeightStore, perform: Callable[[Op], None]) -> None:
        """With the weights that the policy says; which they were is written down."""
        numbered = op._replace(microbatch=op.microbatch + self._hand.minibatch.base)
        if op.kind is Kind.UPDATE:
            with store.updating(numbered) as version:
                perform(op)
        else:
            with store.reading(numbered) as version:
                instead = None
                if op.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                    counts = self._observers.counts_memory
                    instead = store.instead(numbered.microbatch, counts=counts)
                self._observers.watch(op, self._unit(op), perform, instead)
        self._versions[op] = version

    def _unit(self, op: Op) -> int:
        """The number of what an op works on, from the beginning of the stream."""
        program = self._now
        return self._hand.minibatch.base * program.num_slices + program.unit(op)

    @property
    def _now(self) -> Program:
        assert self._program is not None
        return self._program

    @property
    def _mails(self) -> Mail:
        assert self._mail is not None
        return self._mail

    def _forward(self, op: Op) -> None:
        mail, unit = self._mails, self._unit(op)
        on_trust = self.updater.pending
        value = self._hand.input(unit, copied=on_trust) if op.stage == 0 else mail.value_for(op)
        compute = self._compute_on_trust if on_trust or value is VOID else self._compute
        produced = compute(op, value, mail.skips_for(op))
        mail.pass_skips(op, produced.skips)
        if op.stage < self._now.last_stage:
            mail.pass_value(op, produced.value)

    def _compute(self, op: Op, value: Any, skips: dict[str, Any]) -> Produced:
        minibatch, program = self._hand.minibatch, self._now
        unit, is_last = self._unit(op), op.stage == program.last_stage
        with autocast(minibatch.autocast, enabled=True), self._shared.unwritten(op.stage):
            store = self._store(op)
            if store is not None:
                refuse_autocast(store)
            produced = self.stages[op.stage].forward(
                unit,
                value,
                minibatch.step,
                self._hand.criterion(unit) if is_last else None,
                program.keeps[op.stage, program.unit(op)],
                skips,
                minibatch.first,
            )
        if is_last:
            self._hand.keep(unit, produced.value)
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

    def _recompute(self, op: Op) -> None:
        keep = self._now.keeps_again[op.stage, self._now.unit(op)]
        self.stages[op.stage].recompute(self._unit(op), keep)

    def _backward(self, op: Op) -> None:
        result = self.stages[op.stage].backward(self._unit(op), *self._incoming(op))
        self.updater.sums.gathered()
        self._pass_on(op, result)

    def _backward_input(self, op: Op) -> None:
        result = self.stages[op.stage].backward_input(self._unit(op), *self._incoming(op))
        self._pass_on(op, result)

    def _backward_weight(self, op: Op) -> None:
        self.stages[op.stage].backward_weight(self._unit(op))
        self.updater.sums.gathered()

    def _incoming(self, op: Op) -> tuple[Gradients, dict[str, Gradients]]:
        """The gradients of a stage's output and of the skips that it stashed."""
        mail = self._mails
        if op.stage < self._now.last_stage:
            return mail.gradients_for(op), mail.skip_gradients_for(op)
        # d(sum of weighted losses) / d(this loss) is its weight.
        scale = None if self.updater.loss_scale is None else self.updater.loss_scale.scale
        return [self._hand.seed(self._unit(op), scale)], {}

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
        self.updater.sums.hand_in(op.stage)

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
