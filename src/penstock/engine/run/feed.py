"""Feeds minibatches to the ranks: each with its segment of the schedule, several under way at once.

Synchronous minibatches are whole schedules, one after the other. Of an asynchronous pipeline they
are segments of one stream, which goes on until nothing more is fed and then drains. Schedules are
those of the plan, lowered to all that running them takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any

from msgspec import structs

from penstock.base.errors import InputError, RunError
from penstock.core.schedule import Schedule
from penstock.core.schedule.lower import (
    add_agreement,
    add_communication,
    add_reduce,
    add_update,
    add_updates,
    first_microbatches,
    forward_only,
)
from penstock.core.schedule.residence import add_residence
from penstock.core.schedule.rounds import Rounds, Segment, Windows
from penstock.core.versions import PipeMare, least_minibatch
from penstock.engine.run.drive.driver import Driver
from penstock.engine.run.layout import Layout
from penstock.engine.run.logbook import Logbook
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.engine.run.outcome import MinibatchOutcome
from penstock.engine.run.recipe import Recipe
from penstock.planning.plans import Plan
from penstock.planning.plans.spilling import with_residence


def synchronous(
    plan: Plan, layout: Layout, recipe: Recipe, num_microbatches: int, update: bool
) -> Schedule:
    """The ops for one flushed minibatch; with ``update``, weights change at its end."""
    schedule = plan.build_schedule(num_microbatches)
    if plan.spill is not None:
        agrees = recipe.needs_agreement
        return add_communication(
            with_residence(schedule, plan.spill, agrees=agrees, updates=update)
        )
    if update:
        agrees, late = recipe.needs_agreement, recipe.post_validate
        schedule = add_reduce(schedule, layout.weights.shared_stages)
        schedule = add_update(
            schedule, together=agrees and not late, last=layout.weights.updating_tied_weights
        )
        if agrees:
            schedule = add_agreement(schedule, late=late)
    return add_communication(schedule)


def asynchronous(plan: Plan, num_microbatches: int, rounds: Rounds) -> Schedule:
    """The ops for a stream of microbatches that ends there."""
    return add_communication(add_updates(plan.build_schedule(num_microbatches), rounds))


def forwards(plan: Plan, num_microbatches: int) -> Schedule:
    """The ops to evaluate; replicas without a microbatch have nothing to do."""
    schedule = plan.build_schedule(max(num_microbatches, *plan.replicas))
    schedule = forward_only(first_microbatches(schedule, num_microbatches))
    if plan.spill is not None:
        schedule = add_residence(schedule, ahead=plan.spill.ahead)
    return add_communication(schedule)


class Feed:
    """Gives the driver each minibatch with its segment of the schedule, in order.

    Args:
        layout: which rank holds what.
        driver: makes the ranks run segments.

    Attributes:
        under_way: the driver's ticket for each minibatch that has been begun and not collected.
    """

    def __init__(self, plan: Plan, layout: Layout, recipe: Recipe, driver: Driver[Any]) -> None:
        self._plan = plan
        self._layout = layout
        self._recipe = recipe
        self._driver = driver
        self._flushed = lru_cache(maxsize=32)(self._synchronous)
        self._evaluated = lru_cache(maxsize=32)(self._forwards)
        self.under_way: deque[Any] = deque()
        self._goes_on = False
        self._windows: Windows | None = None
        self._num_synchronous = 0
        self._restart()
        self._logbook = Logbook.of_this_process()
        self._logbook.build()
        policy = plan.versions
        self._least_minibatch = least_minibatch(policy, plan.replicas)
        if policy.asynchronous:
            self._windows = Windows(
                lambda count, rounds: asynchronous(plan, count, rounds),
                plan.replicas,
                by_minibatch=policy.updates == "minibatch",
                ahead=policy.ahead,
            )
            self.resume(0)

    def resume(self, step: int) -> None:
        """Go on with the minibatch of this number: of PipeMare, the first ``t3`` train
        with a flush."""
        self._logbook.reach(step)
        policy = self._plan.versions
        self._num_synchronous = max(0, policy.t3 - step) if isinstance(policy, PipeMare) else 0

    def resume_within(self, step: int) -> None:
        """Go on with the minibatch of this number, of a stream whose microbatches before
        it, one to a minibatch, have left gradients that are still under way."""
        self.resume(step)
        assert self._windows is not None
        self._sizes[:] = [1] * min(step, self._windows.num_in_flight)
        self._index = self._first = step
        self._base = step - len(self._sizes)
        self._resumes = step > 0

    def _restart(self) -> None:
        """Nothing is in flight."""
        self._sizes: list[int] = []
        self._resumes = False
        self._index = self._first = self._base = 0

    def train(
        self, minibatches: Iterable[tuple[Minibatch, StreamPosition]]
    ) -> Iterator[MinibatchOutcome]:
        """Train on minibatches one after the other.

        Args:
            minibatches: with what is known of those behind them; where in the stream they stand is
                found here.

        Yields:
            The outcome of each, in order, while the next ones are under way. If the caller leaves
            before the end, call ``drain``.
        """
        self.under_way.clear()
        for minibatch, given in minibatches:
            segment, position = self._segment(minibatch, given)
            self._logbook.begin(minibatch.step)
            self._goes_on = position.more_follow
            try:
                self._submit(segment, minibatch, position)
                most = self._most_under_way(minibatch, position) if position.more_follow else 0
                while len(self.under_way) > most:
                    outcome = self.collect()
                    if not self.under_way:
                        self._logbook.reach(minibatch.step + 1)
                    yield outcome
            except RunError as error:
                if position.failure is None:
                    raise
                raise position.failure from error  # what came first is what people must hear of
            except KeyboardInterrupt:
                self._driver.break_off()  # it may have come between two calls of the driver
                self.under_way.clear()  # whoever drains behind it need not wait for these
                raise
            if position.failure is not None:
                raise position.failure

    def go_on(self, minibatch: Minibatch) -> None:
        """Begin the next minibatch of a stream of which nobody knows yet how it goes on."""
        position = StreamPosition(in_loop=True, more_follow=True)
        if minibatch.inputs:
            self._logbook.begin(minibatch.step)
            segment, position = self._segment(minibatch, position)
        else:
            position = structs.replace(
                position, index=self._index, first=self._first, synchronous=False
            )
            nothing = Segment.whole(Schedule(((),) * self._plan.num_ranks))
            segment = replace(nothing, begins=False, ends=False)
        self._submit(segment, minibatch, position)

    @property
    def has_news(self) -> bool:
        """Whether a minibatch is done that nobody has collected."""
        return bool(self.under_way) and self._driver.is_done(self.under_way[0])

    def collect(self) -> MinibatchOutcome:
        """Wait for the minibatch that has been under way for longest.

        Raises:
            RunError: the first failure of any rank.
        """
        return self._collected(self._driver.collect)

    def retire(self) -> MinibatchOutcome:
        """As ``collect``; what came out of it may be left out."""
        return self._collected(self._driver.retire)

    def drain(self, step: int) -> Iterator[MinibatchOutcome]:
        """Let what is under way come to its end.

        Args:
            step: the number of the next minibatch.

        Yields:
            The outcomes that nobody has collected yet.
        """
        if self._sizes and self._windows is not None:
            segment = self._next(self._windows, len(self._sizes), last=True)
            ending = Minibatch(step, (), num_slices=self._layout.num_slices)
            here = StreamPosition(self._index, self._first, self._base, synchronous=False)
            self._submit(segment, ending, here)
            self._restart()
            while len(self.under_way) > 1:
                yield self.collect()
        else:
            # Updates that were not known to be the last ones come to their end only behind it.
            late = bool(self._plan.summing.stale) and self._goes_on
            while self.under_way and not late:
                yield self.collect()
            nothing = Schedule(((),) * self._plan.num_ranks)
            empty = Minibatch(step, (), trains=False)
            self._submit(Segment.whole(nothing), empty, StreamPosition())
            while len(self.under_way) > 1:
                yield self.collect()
        self.collect()

    def _submit(self, segment: Segment, minibatch: Minibatch, position: StreamPosition) -> None:
        try:
            self.under_way.append(self._driver.submit(segment, minibatch, position))
        except BaseException:
            self._restart()  # nothing is in flight after a failure
            raise

    def _collected(self, collect: Callable[[Any], MinibatchOutcome]) -> MinibatchOutcome:
        try:
            return collect(self.under_way.popleft())
        except BaseException:
            self._restart()
            raise

    def expected(self) -> Segment:
        """The segment that ranks run first if they train on a minibatch as planned; if they never
        train, if they evaluate one."""
        count = self._plan.num_microbatches
        if self._recipe.loss is None:
            return self._evaluated(max(count, *self._plan.replicas))
        if self._windows is None:
            return self._flushed(count, True)
        return self._windows.segment([count], num_before=0, last=True)[0]

    def evaluate(self, minibatch: Minibatch) -> MinibatchOutcome:
        """Run forward only."""
        segment = self._evaluated(minibatch.num_microbatches)
        return self._driver.collect(self._driver.submit(segment, minibatch, StreamPosition()))

    def _segment(
        self, minibatch: Minibatch, given: StreamPosition
    ) -> tuple[Segment, StreamPosition]:
        if not minibatch.updates and self._plan.summing.stale:
            raise InputError(
                "with stale updates each minibatch is one; leave update=False out, or take stale=0"
            )
        if not minibatch.updates and self._windows is not None:
            raise InputError(
                "an asynchronous pipeline updates as it goes; leave update=False out, or plan with "
                "a synchronous schedule"
            )
        count = minibatch.num_microbatches
        if self._windows is None or self._num_synchronous:
            self._num_synchronous = max(0, self._num_synchronous - 1)
            return self._flushed(count, minibatch.updates), given
        last = not given.more_follow or not self._goes_on_after(count)
        self._sizes.append(count)
        segment = self._next(self._windows, len(self._sizes) - 1, last=last)
        if self._resumes:  # ranks have nothing of what came before
            segment, self._resumes = replace(segment, begins=True), False
        position = structs.replace(
            given, index=self._index, first=self._first, base=self._base, synchronous=False
        )
        self._index += 1
        self._first += count
        if last:
            self._restart()
        return segment, position

    def _next(self, windows: Windows, num_before: int, *, last: bool) -> Segment:
        segment, start = windows.segment(self._sizes, num_before=num_before, last=last)
        self._base += sum(self._sizes[:start])
        del self._sizes[:start]
        return segment

    def _goes_on_after(self, count: int) -> bool:
        """Whether the stream can go on behind a minibatch of this size: one that is shorter than
        what is in flight would need versions that are not kept, so the pipeline drains behind
        it."""
        return count >= self._least_minibatch

    def _most_under_way(self, minibatch: Minibatch, position: StreamPosition) -> int:
        """How many minibatches behind the first rank the last one may be."""
        if position.synchronous or self._windows is None:
            return 1 + self._plan.summing.stale
        return 1 + ceil(self._windows.num_in_flight / max(1, minibatch.num_microbatches))

    def _synchronous(self, count: int, update: bool) -> Segment:
        return Segment.whole(synchronous(self._plan, self._layout, self._recipe, count, update))

    def _forwards(self, count: int) -> Segment:
        return Segment.whole(forwards(self._plan, count))
