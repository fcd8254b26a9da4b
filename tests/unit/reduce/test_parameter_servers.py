"""What parameter servers and their workers send."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from penstock.engine.model import tree
from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.reduce.sharding import ShardedReducer, Shards
from penstock.engine.transport.base import OnTop
from tests.unit.reduce.test_sums import between_threads, fill, folded, holders, on_all_ranks


class Counting(OnTop):
    """Counts the bytes of tensors that a rank sends."""

    def __init__(self, inner, sent):
        super().__init__(inner)
        self.sent = sent

    def send(self, edge, number, value):
        self.sent[edge.source] += sum(tensor.nbytes for tensor in tree.tensors(value))
        self.inner.send(edge, number, value)

    def recv(self, edge, number, waiting):
        return tree.replace(torch.Tensor, torch.clone, self.inner.recv(edge, number, waiting))


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("hands_out", [False, True])
def test_a_worker_sends_what_it_has_once_and_gets_weights(num_workers, num_servers, hands_out):
    count = num_workers + num_servers
    servers = range(num_workers, count)
    copies = holders(count, [((96, 40), torch.float32), ((96,), torch.float32)])
    sent = Counter()
    reducers = [
        ShardedReducer(
            rank,
            SharedWeights(0, tuple(range(count)), frozenset({0}), copies[rank]),
            Counting(transport, sent),
            servers=servers,
        )
        for rank, transport in enumerate(between_threads(count))
    ]
    fill(copies[:num_workers], 0)
    expected = folded(copies[:num_workers])

    def work(rank):
        reducer = reducers[rank]
        reducer.hands_sums_to_all = hands_out
        reducer.hand_in(1, 1)
        reducer.advance(averages=False)
        reducer.finish()
        Shards(reducer.shards).lend()
        for shard in reducer.shards.values():
            assert rank in servers or shard.part is None
            if shard.part is not None:
                shard.part.data.sub_(shard.part.grad)
        reducer.hand_back(1)
        reducer.take_back(1)

    on_all_ranks(work, count)
    for parameters in copies[:num_workers]:
        for parameter, wanted in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.detach(), -wanted)
    num_bytes, row = sum(one.nbytes for one in copies[0]), copies[0][0][0].nbytes
    assert {sent[rank] for rank in range(num_workers)} == {num_bytes}
    for rank in servers:
        sums = hands_out * (count - 1)
        formula = (num_workers + sums) * num_bytes / num_servers
        assert abs(sent[rank] - formula) <= (num_workers + sums) * row
