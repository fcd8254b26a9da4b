"""Stale-synchronous updates of one group of weights: two workers and their server, in threads."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.reduce.stale import Serving, StaleReducer
from tests.unit.reduce.test_sums import between_threads, holders, on_all_ranks

NUM_WORKERS, SERVER = 2, 2
SHAPES = [((5, 3), torch.float32), ((), torch.float32), ((4,), torch.float64)]
"""Rows of several numbers, one number without dimensions, rows of one."""
MINIBATCHES = 3
FIRST_NUMBER = 1000


def gradient_of(contribution, place):
    """A number that no sum of others is."""
    minibatch, worker = contribution
    return float(1 + worker + 10 * minibatch + 100 * place)


class Ranks:
    """Workers and a server, whose updates subtract what they add up."""

    def __init__(self, most_stale):
        count = NUM_WORKERS + 1
        self.copies = holders(count, SHAPES)
        self.transports = between_threads(count)
        self.reducers = [
            StaleReducer(
                rank,
                SharedWeights(0, (*range(count),), frozenset({0}), self.copies[rank]),
                self.transports[rank],
                (SERVER,),
                most_stale,
                "ab" * 16,
            )
            for rank in range(count)
        ]

    def work(self, rank):
        """A stream; of workers, the weights that they had in each minibatch."""
        self.reducers[rank].open()
        try:
            return self.serve() if rank == SERVER else [*self.train(rank)]
        finally:
            self.reducers[rank].close(failed=False)

    def serve(self):
        serving = Serving(SERVER, [self.reducers[SERVER]], self.transports[SERVER], self.step)
        for minibatch in range(MINIBATCHES):
            serving.serve(FIRST_NUMBER + minibatch, is_last=minibatch == MINIBATCHES - 1)

    def step(self, _):
        for shard in self.reducers[SERVER].shards.values():
            shard.part.data.sub_(shard.part.grad)

    def train(self, rank):
        for minibatch in range(MINIBATCHES):
            yield [parameter.detach().clone() for parameter in self.copies[rank]]
            for place, parameter in enumerate(self.copies[rank]):
                parameter.grad = torch.full_like(parameter, gradient_of((minibatch, rank), place))
            self.reducers[rank].hand_in(FIRST_NUMBER + minibatch, 1)
            self.reducers[rank].take_back(FIRST_NUMBER + minibatch)


def assert_updated(values, updates):
    """Weights have seen some updates, and no others."""
    for place, value in enumerate(values):
        total = sum(gradient_of(one, place) for own in updates for one in own)
        assert torch.equal(value.detach(), torch.full_like(value, -total))


@pytest.mark.parametrize("most_stale", [1, 2])
def test_workers_have_the_weights_of_the_journals_updates(most_stale):
    """Whatever came first, the journal says what it was."""
    ranks = Ranks(most_stale)
    read = on_all_ranks(ranks.work, NUM_WORKERS + 1)
    stream = ranks.reducers[SERVER].stream
    assert all(reducer.stream == stream for reducer in ranks.reducers)
    every = [*itertools.product(range(MINIBATCHES), range(NUM_WORKERS))]
    assert sorted(one for own in stream.updates for one in own) == every
    for minibatch, worker in every:
        version = stream.reads.get((minibatch, worker), 0)
        assert minibatch == 0 or version >= minibatch - most_stale
        assert_updated(read[worker][minibatch], stream.updates[:version])
    for parameters in ranks.copies:  # behind the last minibatch
        assert_updated(parameters, stream.updates)
