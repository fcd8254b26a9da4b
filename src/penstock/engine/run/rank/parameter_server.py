"""A rank that runs no stage: it sums gradients, updates, and hands weights back.

It goes through the same minibatches as all others, and takes part in what all ranks agree on; in
place of ops it has the updates of the stages that it serves. What it sends and waits for is
``reduce.sharding``'s or, where workers need not wait for each other, ``reduce.stale``'s.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from penstock.core.schedule.rounds import Segment
from penstock.engine.reduce.stale import Serving
from penstock.engine.run.minibatch import Minibatch, StepResult, StreamPosition
from penstock.engine.run.rank.worker import Worker
from penstock.engine.transport import Edge


class ParameterServer(Worker):
    """Performs the updates of one parameter server.

    Its stages are those that it serves: of their parameters it has what its optimizers step, and
    nothing of them is ever run.
    """

    runs_stages = False

    @cached_property
    def _stale(self) -> Serving | None:
        """Serves workers that need not wait for each other."""
        reducers = self.updater.sums.stale
        return Serving(self.rank, reducers, self.transport, self._step) if reducers else None

    def _run(self, segment: Segment, minibatch: Minibatch, position: StreamPosition) -> StepResult:
        try:
            self._begin(minibatch, position)
            result = StepResult(number=self._stream.pending.number + position.index)
            if self._stale is not None:
                self._serve(self._stale, minibatch, position)
            elif minibatch.trains and minibatch.updates and minibatch.inputs:
                self._update()
        except BaseException as error:
            error.add_note(self.dump())
            self.updater.drop_gradients()
            self.forget()
            raise
        result.norm = self.updater.norm
        self.num_runs += 1
        return result

    def _update(self) -> None:
        for stage in self.stages:
            self.updater.sums.hand_in(stage)  # of this rank, nothing
        if self._recipe.needs_agreement:
            self._parts.updates.now.agree()
        # Backwards make the gradients of the last stages first.
        for stage in reversed([*self.stages]):
            self._parts.updates.now.update(stage)

    def _serve(self, serving: Serving, minibatch: Minibatch, position: StreamPosition) -> None:
        number = self.updater.sums.number
        if not minibatch.inputs:
            serving.drain(number)
        elif minibatch.trains:
            serving.serve(number, is_last=not position.more_follow)

    def _step(self, stages: Collection[int]) -> None:
        for stage in stages:
            self.updater.step_alone(stage)

    def forget(self) -> None:
        super().forget()
        if self._stale is not None:
            self._stale.forget()

    def dump(self) -> str:
        stages = ", ".join(map(str, self.stages))
        return f"rank {self.rank}: parameter server of stages {stages}, {self.num_runs} minibatches"

    def first_units(self, segment: Segment) -> dict[Edge, int]:
        return {}

    def outgoing(self, segment: Segment) -> set[Edge]:
        return self.updater.sums.outgoing()
