"""A worker: one rank's stages, and what they need to go through minibatches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from threading import get_ident

from torch import nn

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.core.schedule.rounds import Segment
from penstock.engine.device.queue import NOTHING_ASKED, Moments, moments_of_caller
from penstock.engine.model import tree
from penstock.engine.model.replay import SavedBuffer, put_back, saved_buffers
from penstock.engine.model.spine import evaluation_mode
from penstock.engine.run.minibatch import Minibatch, StepResult, StreamPosition, modes
from penstock.engine.run.rank.compiler import NO_EXTRAS, Compiler, RankExtras, RankParts
from penstock.engine.run.rank.failures import FailureContext
from penstock.engine.run.rank.interpreter import Journal, Pace, Restart, perform_all
from penstock.engine.run.rank.updater import Updater
from penstock.engine.run.rank.work import (
    LossGradients,
    PendingGradient,
    PendingValues,
    RankWork,
    StreamState,
)
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.seating import MeshTransport, seated
from penstock.engine.stage.protocol import RunnableStage
from penstock.engine.tensor.sharing import SharedLayer
from penstock.engine.transport import Edge, Transport
from penstock.engine.weights.store import HeldVersions

NUMBERS_PER_RUN = 1 << 32


class Worker:
    """Performs segments of a schedule on minibatches, for one rank.

    A driver calls ``run`` in the rank's thread, or in its process, for one minibatch after the
    other. Everything else is called between minibatches, when nothing runs.

    Args:
        stages: the stages it holds, by number.
        transport: its end of the channels to other ranks.
        updater: applies the gradients of these stages.
        extras: what else it has.

    Attributes:
        rank, stages, transport, updater: as given.
        stores, residence: as in ``extras``.
        offloading: lets activations leave, if any do.
        seat: which member of the rank it is.
        channels: its end of all channels, numbered by seats.
        pace: gives the steps of minibatches to train on, for whoever lets several workers take
            turns; ``None``: all at once.
        queue: its work on its device; ``None`` where all is done in main memory.
        num_runs: minibatches completed.
        num_attempts: streams begun, whether completed or not; a synchronous minibatch is one of its
            own. Equal on all ranks between steps, since it numbers their messages.
    """

    runs_stages = True
    """Whether it performs the ops of a rank of the schedule."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, RunnableStage],
        transport: Transport,
        recipe: Recipe,
        updater: Updater,
        extras: RankExtras = NO_EXTRAS,
    ) -> None:
        self.rank = rank
        self.seat, self.channels = seated(rank, transport)
        self.stages = stages
        self.transport = transport
        self.updater = updater
        self.queue = transport.queue
        self.num_runs = self.num_attempts = 0
        self.stores = extras.stores
        self.residence = extras.residence
        self.pace: Pace | None = None
        self._thread: int | None = None
        self._recipe = recipe
        self._shapes = extras.shapes
        self._parts = RankParts.of(rank, stages, recipe, updater, extras)
        self.offloading = self._parts.offloading
        self._compiler = Compiler(self._parts)
        self._journal = Journal()
        self._stream = StreamState(PendingValues(transport, 0))
        self._resent: Sequence[PendingGradient] = ()
        self._seeds = LossGradients()
        if self.residence is not None:
            self.residence.follow(updater.optimizers, updater.deferred)

    @property
    def counts_memory(self) -> bool:
        """Whether the rank's result tells how much memory the rank held."""
        return self._parts.observers.counts_memory

    @property
    def runs_in_this_thread(self) -> bool:
        """Whether whoever asks is called by what it runs, as a layer is."""
        return self._thread == get_ident()

    @property
    def on_trust(self) -> bool:
        """Whether updates have been made that are not validated yet."""
        return self._parts.updates.now.unvalidated

    def run(
        self,
        segment: Segment,
        minibatch: Minibatch,
        position: StreamPosition | None = None,
        callers: Moments = NOTHING_ASKED,
    ) -> StepResult:
        """Perform this rank's ops of a segment on one minibatch.

        If the minibatch trains, gradients are computed and accumulate in ``.grad``.

        Args:
            segment: a part of a lowered schedule.
            position: where the minibatch stands in its stream; by default it is all of one.
            callers: what the caller has asked of devices, behind which all of this comes.

        Raises:
            RunError: an op failed; telling the peers is the driver's part.
        """
        position = position or StreamPosition()
        self._thread = get_ident()
        try:
            if self.queue is None:
                return self._run(segment, minibatch, position)
            with self.queue.entered():
                self.queue.begin(callers)
                result = self._run(segment, minibatch, position)
                result.moment = self.queue.moment()
            return result
        finally:
            self._thread = None

    def _run(self, segment: Segment, minibatch: Minibatch, position: StreamPosition) -> StepResult:
        # [4] of post-validation, which ``on_trust`` describes.
        buffers = saved_buffers(self._parts.observers.modules) if self.on_trust else []
        ends = True
        try:
            self._parts.observers.attend(minibatch)
            with self._modes_for(minibatch):
                while True:
                    try:
                        result = self._attempt(segment, minibatch, position)
                    except Restart:
                        self._start_again(buffers)
                    else:
                        ends = segment.ends
                        return result
        except BaseException as error:
            error.add_note(self.dump())
            if minibatch.trains:
                # What was accumulated must not leak into the next minibatch's gradients.
                self.updater.drop_gradients()
            if self.residence is not None:
                self.forget()  # what failed still sees the weights that leave
                self.residence.forget()
            raise
        finally:
            if ends:
                self.forget()
            self._parts.observers.leave()

    def _attempt(
        self, segment: Segment, minibatch: Minibatch, position: StreamPosition
    ) -> StepResult:
        if segment.begins:
            self._begin(minibatch, position)
        self._stream.take_in(minibatch, position, self.stores)
        for store in self.stores.values():
            store.synchronous = position.synchronous
            if minibatch.inputs:
                store.extend(position.first + minibatch.num_microbatches)
        program = self._compiler.program(segment)
        stamps = None if self.queue is None else self.queue.stamps()
        self._journal = Journal(program.ops, program.waiting, stamps)
        waited = self._journal.waited
        work = RankWork(
            minibatch, position, self._recipe, self._stream, self._seeds, self.queue, waited
        )
        self._parts.shared.begin()
        steps = self._compiler.steps(segment, minibatch.trains)
        paced = steps if self.pace is None or not minibatch.trains else self.pace(steps)
        context = FailureContext(self.rank, self.stages, self._shapes, self._stream.frames)
        perform_all(paced, work, self._journal, position.base, context)
        self._parts.shared.check()
        if minibatch.mark is not None:
            for stage in self.stages:
                minibatch.mark.forwards_done(stage)
                if self._reads_newest:  # no update of this frame or of an earlier one is to come
                    minibatch.mark.updated(stage)
        return self._result_of(segment, work)

    def _modes_for(self, minibatch: Minibatch) -> AbstractContextManager[object]:
        if minibatch.learns:
            return modes(minibatch.trains, shares=self.seat.size > 1)
        return self._predicting(minibatch)

    @contextmanager
    def _predicting(self, minibatch: Minibatch) -> Iterator[None]:
        """A frame of which only the output is wanted, among others from which stages learn."""
        # Backwards of earlier frames, which come meanwhile, need the graphs of their own forwards.
        with (
            modes(minibatch.trains and not self._reads_newest),
            evaluation_mode(*self._layer_modules),
        ):
            yield

    @property
    def pending_gradients(self) -> list[PendingGradient]:
        """Gradients that are on their way from this rank to others, where they are remembered."""
        return self._stream.pending.pending_gradients

    def resend(self, pending_gradients: Sequence[PendingGradient]) -> None:
        """When the next stream begins, send what was on its way when this one was saved."""
        self._resent = pending_gradients

    def _begin(self, minibatch: Minibatch, position: StreamPosition) -> None:
        number = self.next_number()
        self._parts.updates.begin(number, asynchronous=not position.synchronous)
        empty = sum(not weight for weight in minibatch.weights)
        if empty and minibatch.trains and self.updater.sums.expert_homes:
            raise InputError(
                f"{count_of(empty, 'microbatch', 'es')} of this minibatch would count nothing, "
                "without rows or with labels that are all ignored, so that one copy would go back "
                "through experts that others have, and they not through its; give each microbatch "
                "something that counts, or take expert_ranks=1"
            )
        self.updater.sums.gather(minibatch.num_microbatches - empty)
        self._stream = StreamState(
            PendingValues(self.transport, number, remembers=self._reads_newest)
        )
        for gradient in self._resent:
            self._stream.pending.send(*gradient)
        self._resent = ()
        if minibatch.trains:
            if self._parts.so_far is not None:
                self._parts.so_far.begin()
            for store in self.stores.values():
                store.begin()
        self._parts.observers.begin()
        if self.residence is not None:
            self.residence.begin()

    def _result_of(self, segment: Segment, work: RankWork) -> StepResult:
        result = work.result
        result.starts, result.ends = self._journal.starts, self._journal.ends
        result.stamps = self._journal.stamps
        for stored in (self.residence, self.offloading):
            if stored is not None:
                result.moved += stored.transfers.take_moved()
        if (self.stores or self._reads_newest) and work.minibatch.trains:
            result.versions = [work.versions.get(op, -1) for op in segment.ranks[self.rank]]
            result.held = max(
                (store.most for store in self.stores.values()), default=self._one_version
            )
        self._parts.observers.commit()
        if not work.position.more_follow:
            self._parts.updates.now.settle()
            self.updater.sums.take_back()
        if not work.minibatch.inputs:
            self.updater.sums.take_last()
        sums = self.updater.sums
        if sums.has_any:
            result.moved += [("sum", stage, *passed) for stage, passed in sums.take_passed()]
            result.moved += [("served", stage, *served) for stage, served in sums.take_served()]
        result.norm = self.updater.norm
        result.peak = self._parts.observers.peak(segment.schedule.num_slices)
        self.num_runs += 1
        return result

    @property
    def _reads_newest(self) -> bool:
        """Whether weights have one version, which passes of several ages read."""
        return self._parts.so_far is not None

    @cached_property
    def _layer_modules(self) -> list[nn.Module]:
        return [module for stage in self.stages.values() for module in stage.layer_modules]

    @cached_property
    def _one_version(self) -> HeldVersions:
        """The count and size of weights that have no further versions."""
        parameters = (p for module in self._layer_modules for p in module.parameters())
        return HeldVersions(1, sum({id(p): p.nbytes for p in parameters}.values()), 0)

    def next_number(self) -> int:
        """A number that tells messages of this attempt from others, on every rank alike; those of
        the next one are ``NUMBERS_PER_RUN`` higher."""
        self.num_attempts += 1
        return self.num_attempts * NUMBERS_PER_RUN

    def _start_again(self, buffers: list[SavedBuffer]) -> None:
        """The weights that this minibatch has used so far were not to be: forget the attempt."""
        self.forget()  # [7]
        self.transport.discard((self.num_attempts + 1) * NUMBERS_PER_RUN)
        put_back(buffers)

    def forget(self) -> None:
        """Drop everything of the current stream, finished or not."""
        self._parts.observers.forget()
        for stage in self.stages.values():
            stage.forget()
        self._stream = StreamState(PendingValues(self.transport, 0))
        self._journal.end()
        if self.offloading is not None:
            self.offloading.forget()

    def start_over(self) -> None:
        """A minibatch has failed on some rank: drop everything of it, and of what members of a
        group do once, since some of them may have come to it."""
        self.forget()
        for stage in self.stages.values():
            for module in stage.layer_modules:
                if isinstance(module, SharedLayer):
                    module.first_run.renew()

    @contextmanager
    def visiting(self, stage: int, *, changes: bool = False) -> Iterator[None]:
        """Have a stage in memory between steps, wherever it is, for whoever reads its weights and
        what its optimizer keeps.

        Args:
            changes: whether these become others.
        """
        if self.residence is None:
            yield
            return
        with self.residence.visiting(stage, changes=changes):
            yield

    def apply_deferred(self) -> None:
        """Make the updates that were deferred, between steps."""
        if self._parts.deferred is not None:
            self._parts.deferred.apply_all()

    def drop_deferred(self) -> None:
        """Forget what deferred updates still wait for: other weights come."""
        if self.residence is not None:
            self.updater.deferred.clear()
            self.residence.forget()

    def close(self) -> None:
        """Give back what is kept outside of memory."""
        if self.residence is not None:
            self.residence.close()
        if self.offloading is not None:
            self.offloading.close()

    def dump(self) -> str:
        """This rank's last ops and what it does now; may be asked from any thread."""
        return self._journal.text(self.rank)

    def first_units(self, segment: Segment) -> dict[Edge, int]:
        """The number of the first message on every edge of the chain on which this rank sends; the
        edges are those between seats."""
        units = self._compiler.program(segment).first_units()
        return {own: unit for edge, unit in units.items() for own in self._between_seats(edge)}

    def outgoing(self, segment: Segment) -> set[Edge]:
        """The edges between seats on which others wait for this rank."""
        between_ranks = self._compiler.program(segment).outgoing() | self.updater.sums.outgoing()
        between_seats = {own for edge in between_ranks for own in self._between_seats(edge)}
        return between_seats | self.updater.gradients.outgoing_to_members()

    def _between_seats(self, edge: Edge) -> list[Edge]:
        return self.transport.edges(edge) if isinstance(self.transport, MeshTransport) else [edge]


def moments_of(minibatch: Minibatch, workers: Iterable[Worker]) -> Moments:
    """All that the caller, whose thread this is, has asked of the devices of some ranks so far, and
    of those on which the minibatch is."""
    queues = [worker.queue for worker in workers if worker.queue is not None]
    if not queues:
        return NOTHING_ASKED
    given = tree.tensors([*minibatch.inputs, *minibatch.targets])
    devices = {queue.device for queue in queues} | {tensor.device for tensor in given}
    return moments_of_caller(devices)
