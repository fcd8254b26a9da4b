"""Update protocols: when gradients become weights. One class each, behind one interface.

All give the result of one device, except that in a stream gradients may be old:

- ``FlushedUpdates``: each stage steps as soon as its gradients are complete; where something global
  is asked for, ranks agree first: all tell their norms, wait for the others', clip or skip.
- ``DeferredUpdates``: stages come and go, and their gradients leave memory before ranks can agree;
  each stage steps when it is in memory again, with the next minibatch.
- ``on_trust.UpdatesOnTrust``: each stage steps at once, and the verdict is read later.
- ``StreamedUpdates``: nothing is flushed, and each stage steps at the end of each of its rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from torch import nn

from penstock.engine.reduce.agreement import Share, Verdict
from penstock.engine.run.rank.updater import Updater
from penstock.engine.transport.base import FIRST_EXCHANGE
from penstock.engine.weights.residency import Residency

NOTHING_KNOWN = Share({})


class UpdateProtocol(ABC):
    """When the stages of one rank step, through a minibatch or a stream of them.

    The worker calls ``begin``; then UPDATE ops call ``update`` once for each stage and round. AGREE
    ops call ``agree`` where updates follow them, ``settle`` where updates came before.

    Args:
        updater: has the rank's optimizers and gradients.
    """

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._number = 0
        self._averages = False
        self._to_update: set[int] = set()

    def begin(self, number: int) -> None:
        """Start a minibatch, or a stream of them; ``number`` tells its messages from those of
        others."""
        self._updater.gradients.begin(number)
        self._begin_round(FIRST_EXCHANGE + number)

    def _begin_round(self, number: int) -> None:
        self._number = number
        self._updater.gradients.begin_round(number, averages=self._averages)
        self._to_update = set(self._updater.holdings)

    @abstractmethod
    def update(self, stage: int) -> None:
        """Step one stage whose gradients are complete."""

    def agree(self) -> None:
        """Wait for all ranks' norms, and make the gradients what the verdict says."""
        raise NotImplementedError

    @property
    def unvalidated(self) -> bool:
        """Whether steps have been made that are not validated yet."""
        return False

    def settle(self) -> bool:
        """Read the verdict on steps that are not validated yet, if there are any.

        Returns:
            Whether they stand. If not, they have been undone and made as the verdict says, and
            whatever was computed with the wrong weights must be computed again.
        """
        return True

    def _agreed(self, noted: Share) -> Verdict:
        """The verdict of all ranks, from gradients that are here and what was noted of others."""
        updater = self._updater
        updater.gradients.complete()
        overflow = updater.unscale(updater.gradients.of(updater.holdings))
        share = noted.with_that_of(updater.gradients.share(overflow))
        updater.tell(self._number, share)
        return updater.judge(self._number, share)


class FlushedUpdates(UpdateProtocol):
    """One round for each minibatch, behind which the pipeline is flushed."""

    def __init__(self, updater: Updater) -> None:
        super().__init__(updater)
        self._verdict: Verdict | None = None

    def begin(self, number: int) -> None:
        super().begin(number)
        self._verdict = None

    def agree(self) -> None:
        self._verdict = self._agreed(NOTHING_KNOWN)

    def update(self, stage: int) -> None:
        self._to_update.discard(stage)
        updater, learned = self._updater, True
        if updater.steps_in_turn(stage):
            updater.num_updates += 1
            updater.step_in_turn(stage)
        else:
            learned = self._update_whole(stage)
        if not self._to_update:
            updater.sums.relay()
            if learned:
                updater.step_schedulers()
            self._end_round()

    def _update_whole(self, stage: int) -> bool:
        """Step a stage when all of its gradients are complete; whether there was any to learn
        from, if that matters."""
        updater = self._updater
        updater.gradients.complete(stage)
        recipe = updater.recipe
        learned = not recipe.skips_without_gradient or updater.gradients.has_any(stage)
        if stage in updater.optimizers and learned:
            updater.num_updates += 1
            updater.clip(stage)
            updater.step(stage, self._verdict)
        if recipe.optimizer is not None:
            updater.sums.hand_back(stage)
        return learned

    def _end_round(self) -> None:
        """All stages have stepped."""


class StreamedUpdates(FlushedUpdates):
    """Round after round, until the stream ends; ranks cannot agree on gradients that are of
    different ages."""

    def __init__(self, updater: Updater) -> None:
        super().__init__(updater)
        recipe = updater.recipe
        self._averages = recipe.averages and recipe.updates == "microbatch"

    def _end_round(self) -> None:
        self._begin_round(self._number + 1)


class DeferredUpdates(FlushedUpdates):
    """Updates of stages that come and go, on which all ranks agree.

    A LEAVE op calls ``note`` for gradients that go out complete. AGREE comes behind all of them;
    LATE_UPDATE, in the next minibatch, calls ``apply`` when the stage is here, or the worker calls
    ``apply_all`` between steps, for whoever reads weights then.

    Args:
        residence: brings stages, with what their updates need.
    """

    def __init__(self, updater: Updater, residence: Residency) -> None:
        super().__init__(updater)
        self._residence = residence
        self._noted = NOTHING_KNOWN

    def begin(self, number: int) -> None:
        super().begin(number)
        self._noted = NOTHING_KNOWN

    def note(self, stage: int, leaving: Iterable[nn.Parameter]) -> None:
        """Note the norms of a stage's complete gradients, which leave memory.

        Args:
            leaving: the weights whose gradients leave.
        """
        own = {id(parameter) for parameter in leaving}
        held = self._updater.holdings[stage]
        gradients = (
            parameter.grad
            for parameter in held.named.values()
            if id(parameter) in own and parameter.grad is not None
        )
        overflow = self._updater.unscale(gradients)
        counted = {place: weight for place, weight in held.counted.items() if id(weight) in own}
        self._noted = self._noted.with_that_of(Share.of(counted, overflow))

    def agree(self) -> None:
        verdict = self._agreed(self._noted)
        self._updater.deferred.update(dict.fromkeys(self._updater.optimizers, verdict))

    def apply(self, stage: int, waited: Callable[[], None] | None = None) -> None:
        """Make the update of a stage, if one was deferred, while its weights are in memory.

        Args:
            waited: told when all that the update needs has come.
        """
        updater, residence = self._updater, self._residence
        if stage not in updater.deferred:
            return
        residence.arrive_with_state(stage)
        residence.bring_gradients(stage)
        if waited is not None:
            waited()
        verdict = updater.deferred.pop(stage)
        updater.num_updates += 1
        updater.step(stage, verdict)
        updater.step_scheduler(stage)
        # What has been made for good belongs to no step that may fail later.
        updater.num_updates -= 1
        residence.updated(stage, late=True)

    def apply_all(self) -> None:
        """Make all that were deferred."""
        for stage in [*self._updater.deferred]:
            with self._residence.visiting(stage):
                self.apply(stage)


class UpdateProtocols:
    """The protocol by which a rank updates at the moment: a pipeline that never flushes may begin
    with minibatches that are flushed all the same.

    Args:
        flushed: the protocol of minibatches that are flushed.
        streamed: the one of streams.

    Attributes:
        now: the one of the stream that was begun last.
    """

    def __init__(self, flushed: UpdateProtocol, streamed: UpdateProtocol) -> None:
        self._flushed = flushed
        self._streamed = streamed
        self.now = flushed

    def begin(self, number: int, *, asynchronous: bool) -> None:
        """The worker begins a minibatch, or a stream of them if it is asynchronous."""
        self.now = self._streamed if asynchronous else self._flushed
        self.now.begin(number)
