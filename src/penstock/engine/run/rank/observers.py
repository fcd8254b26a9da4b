"""Who looks on while a worker computes: the counter of memory, and minibatch statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from penstock.core.schedule import Kind
from penstock.core.schedule.op import COMPUTE, FORWARDS
from penstock.engine.device.activation_meter import KeptMemory, Saved, saving
from penstock.engine.run.counting import Counter, Peak
from penstock.engine.run.minibatch import Minibatch
from penstock.engine.run.rank.interpreter import RankStep
from penstock.engine.run.rank.work import Work
from penstock.engine.run.recipe import Recipe
from penstock.engine.stage.batch_norm import MinibatchStatistics
from penstock.engine.stage.protocol import RunnableStage
from penstock.engine.weights.store import Instead

_WATCHED = COMPUTE | {Kind.RECOMPUTE}


class Observers:
    """Those who look on while one rank computes.

    Args:
        recipe: says which observers there are.

    Raises:
        InputError: a module has statistics that cannot be gathered over a minibatch.
    """

    def __init__(self, stages: Mapping[int, RunnableStage], recipe: Recipe) -> None:
        self._modules = [module for stage in stages.values() for module in stage.layer_modules]
        self._gathers = recipe.batch_norm == "minibatch"
        if self._gathers:
            MinibatchStatistics(self._modules).close()  # refuses now what it would refuse later
        self._statistics: MinibatchStatistics | None = None
        self._counter = Counter(stages) if recipe.count_memory else None

    @property
    def modules(self) -> Iterable[nn.Module]:
        """All that the rank's layers consist of."""
        return (module for layer in self._modules for module in layer.modules())

    @property
    def counts_memory(self) -> bool:
        """Whether there will be a peak."""
        return self._counter is not None

    def attend(self, minibatch: Minibatch) -> None:
        """A minibatch begins. Hooks of statistics must not get into copies of the model that are
        made between steps, so they come and go."""
        gathers = self._gathers and minibatch.trains
        self._statistics = MinibatchStatistics(self._modules) if gathers else None

    def leave(self) -> None:
        """The minibatch has ended, well or not: take the hooks away."""
        if self._statistics is not None:
            self._statistics.close()
            self._statistics = None

    def begin(self) -> None:
        """Nothing is in flight."""
        if self._counter is not None:
            self._counter.begin()

    def look_on(self, kind: Kind) -> bool:
        """Whether anybody may be interested in ops of a kind."""
        return kind in _WATCHED and (self._gathers or self._counter is not None)

    def watch(
        self,
        step: RankStep[Work],
        work: Work,
        unit: int,
        instead: Instead | None = None,
        around: Callable[[Saved], Any] | None = None,
    ) -> None:
        """Perform a compute step under all eyes that are interested.

        Args:
            unit: its number in the stream.
            instead: what autograd is to save in the place of weights, if anything.
            around: what autograd is to save in the place of all else, if anything.
        """
        saves = instead is not None or around is not None
        if self._statistics is None and self._counter is None and not saves:
            step.perform(work)
            return
        op = step.op
        with ExitStack() as stack:
            if self._statistics is not None and op.kind is not Kind.FORWARD:
                # What runs forward again counts no second time.
                stack.enter_context(self._statistics.paused())
            if self._counter is not None and op.kind in FORWARDS:
                stack.enter_context(self._counter.watching(op.stage, unit, instead, around))
            elif saves:
                stack.enter_context(saving(instead, around))
            step.perform(work)
        if self._counter is not None:
            self._counter.after(op.stage, unit)

    def count(self, stage: int, unit: int) -> None:
        """Count anew what a stage holds of a unit outside of autograd."""
        if self._counter is not None:
            self._counter.after(stage, unit)

    def keep(self, key: tuple[int, int], tensors: Iterable[Tensor]) -> KeptMemory | None:
        """Count memory that belongs to a stage and a unit, as long as what this gives is held."""
        return None if self._counter is None else self._counter.keep(key, tensors)

    def commit(self) -> None:
        """The minibatch is complete: its statistics count."""
        if self._statistics is not None:
            self._statistics.commit()

    def peak(self, num_slices: int) -> Peak | None:
        """The most that was held since nothing was in flight."""
        return None if self._counter is None else self._counter.peak(num_slices)

    def forget(self) -> None:
        """Nothing is in flight any more."""
        if self._statistics is not None:
            self._statistics.forget()
        if self._counter is not None:
            self._counter.forget()
