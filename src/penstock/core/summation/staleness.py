"""Which gradients each update gets where workers need not wait for the slowest of them.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS'13: a worker may be so many minibatches ahead of the slowest one, and no more. Here the server
decides, as gradients arrive:

1. Update u, from 0, is made as soon as some worker has handed in minibatch u, and all workers have
   handed in all minibatches up to u − s. It gets whatever has arrived since the update before.
2. A worker that has handed in minibatch k goes on with the newest weights there are as soon as
   update k has been made. So in minibatch k it never reads weights of fewer than k updates, and
   what it computes with them is in update k + s at the latest: stale by s updates at most.
3. Behind the last minibatch the update waits for all, so that a stream of K minibatches has K
   updates, and all of its gradients are in its weights.

With s = 0 update u gets minibatch u of all workers: that is synchronous training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Contribution(NamedTuple):
    """The gradients of a worker and a minibatch; in this order contributions are added.

    Attributes:
        minibatch: its number in the stream, from 0.
        worker: the worker's place among those that have a copy.
    """

    minibatch: int
    worker: int


class Answer(NamedTuple):
    """Weights for a worker.

    Attributes:
        to: what the worker has handed in.
        version: how many updates the weights have seen; it reads them in the next minibatch.
    """

    to: Contribution
    version: int


@dataclass
class StaleStream:
    """The way of the gradients of one stage in one stream: enough to go it again.

    Attributes:
        updates: what each update has added up, in its order.
        reads: how many updates the weights had seen that a worker read in a minibatch.
    """

    updates: list[tuple[Contribution, ...]] = field(default_factory=list)
    reads: dict[Contribution, int] = field(default_factory=dict)

    def read_by(self, contribution: Contribution) -> int:
        """How many updates the weights had seen with which something was computed."""
        return self.reads[contribution] if contribution.minibatch else 0

    @property
    def delays(self) -> dict[Contribution, int]:
        """How many updates came between the weights that were read and the update that applied
        what was computed with them."""
        return {
            contribution: number - self.read_by(contribution)
            for number, own in enumerate(self.updates)
            for contribution in own
        }

    def packed(self) -> list[int]:
        """As plain numbers."""
        numbers = [len(self.updates)]
        for own in self.updates:
            numbers += [len(own), *(number for contribution in own for number in contribution)]
        for (minibatch, worker), version in self.reads.items():
            numbers += [minibatch, worker, version]
        return numbers

    @classmethod
    def unpacked(cls, packed: Sequence[int]) -> StaleStream:
        """Undo ``packed``."""
        numbers = iter(packed)
        updates = [
            tuple(Contribution(next(numbers), next(numbers)) for _ in range(next(numbers)))
            for _ in range(next(numbers))
        ]
        reads = {Contribution(minibatch, next(numbers)): next(numbers) for minibatch in numbers}
        return cls(updates, reads)


class StaleClock:
    """Decides what each update of one stage gets, and who may go on.

    Args:
        num_workers: how many hand in gradients.
        most_stale: s, by how many updates a gradient may be late.

    Attributes:
        stream: what has been decided.
    """

    def __init__(self, num_workers: int, most_stale: int) -> None:
        self._most_stale = most_stale
        self._given = [0] * num_workers
        self._to_apply: list[Contribution] = []
        self._to_answer: list[Contribution] = []
        self._last: int | None = None
        self.stream = StaleStream()

    @property
    def num_updates(self) -> int:
        """How many updates have been decided on."""
        return len(self.stream.updates)

    def next_of(self, worker: int) -> Contribution:
        """The contribution that a worker hands in next."""
        return Contribution(self._given[worker], worker)

    def arrive(self, worker: int) -> list[tuple[Contribution, ...] | Answer]:
        """The next gradients of a worker are there.

        Returns:
            What to do now, in this order: updates, as what they add up, and answers.
        """
        contribution = self.next_of(worker)
        self._given[worker] += 1
        self._to_apply.append(contribution)
        self._to_answer.append(contribution)
        return self._decided()

    def ends_with(self, minibatch: int) -> list[tuple[Contribution, ...] | Answer]:
        """No minibatch follows this one; returns what to do now."""
        self._last = minibatch
        return self._decided()

    @property
    def is_over(self) -> bool:
        """Whether all is applied and answered up to the last minibatch."""
        at_end = self._last is not None and min(self._given) > self._last
        return at_end and not self._to_apply and not self._to_answer

    def is_over_for(self, contribution: Contribution) -> bool:
        """Whether nothing of the stream is left to decide, so that an answer to this contribution
        is the last one to its worker."""
        at_end = self._last is not None and min(self._given) > self._last
        return at_end and not self._to_apply and contribution.minibatch == self._last

    def _decided(self) -> list[tuple[Contribution, ...] | Answer]:
        decided: list[tuple[Contribution, ...] | Answer] = []
        while self._may_update():
            own = tuple(sorted(self._to_apply))
            self._to_apply.clear()
            self.stream.updates.append(own)
            decided.append(own)
            decided += self._answers()
        return decided + self._answers()

    def _may_update(self) -> bool:
        number = self.num_updates
        if self._last is not None and min(self._given) > self._last:
            return bool(self._to_apply)
        if max(self._given) <= number:
            return False
        return min(self._given) > (number if number == self._last else number - self._most_stale)

    def _answers(self) -> list[tuple[Contribution, ...] | Answer]:
        due = [own for own in self._to_answer if own.minibatch < self.num_updates]
        for contribution in due:
            self._to_answer.remove(contribution)
            after = Contribution(contribution.minibatch + 1, contribution.worker)
            self.stream.reads[after] = self.num_updates
        return [Answer(contribution, self.num_updates) for contribution in due]
