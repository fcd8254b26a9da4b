"""Who owns which rows, and which optimizers may have rows only."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import InputError
from penstock.engine.model import tree
from penstock.engine.reduce.buckets import row_shards_of
from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.reduce.sharding import Shard, ShardedReducer, Shards
from penstock.engine.transport.base import OnTop
from tests.unit.reduce.test_sums import between_threads, fill, folded, holders, on_all_ranks

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=SHAPES, num_owners=st.integers(1, 5))
def test_every_row_has_one_owner_and_owners_are_as_equal_as_rows_allow(shapes, num_owners):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    slices = row_shards_of(parameters, dict.fromkeys(range(num_owners), 1))
    owned = [torch.zeros(parameter.numel()) for parameter in parameters]
    for _, pieces in slices:
        for place, start, stop in pieces:
            assert start < stop
            row = parameters[place][0].numel() if parameters[place].dim() else 1
            assert start % row == stop % row == 0
            owned[place][start:stop] += 1
    assert all((one == 1).all() for one in owned)
    sizes = [sum(piece.stop - piece.start for piece in pieces) for _, pieces in slices]
    rows = [one[0].numel() if one.dim() else 1 for one in parameters if one.numel()]
    assert max(sizes) - min(sizes) <= 2 * max(rows, default=0)


def shards_of(parameter):
    rows = nn.Parameter(parameter.detach()[1:3])
    return Shards({parameter: Shard(1, rows)}), rows


def test_an_optimizer_steps_rows_in_the_memory_of_the_whole():
    whole = nn.Parameter(torch.ones(4, 2))
    shards, rows = shards_of(whole)
    optimizer = torch.optim.SGD([whole], lr=1.0, momentum=0.5)
    shards.put_into(optimizer, "stage 0")
    assert optimizer.param_groups[0]["params"] == [rows]
    whole.grad = torch.arange(8.0).view(4, 2)
    shards.lend()
    optimizer.step()
    assert whole.tolist() == [[1, 1], [-1, -2], [-3, -4], [1, 1]]
    shards.clear([whole])
    assert whole.grad is None
    assert rows.grad is None


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Muon])
def test_an_optimizer_that_may_need_whole_parameters_is_refused_by_name(make):
    whole = nn.Parameter(torch.ones(4, 2))
    optimizer = make([whole])
    with pytest.raises(InputError, match=f"{make.__name__}, the optimizer of stage 3, may need"):
        shards_of(whole)[0].put_into(optimizer, "stage 3")


def test_a_class_may_say_that_it_needs_no_whole_parameters():
    class Own(torch.optim.SGD):
        elementwise = True

    whole = nn.Parameter(torch.ones(4, 2))
    shards, rows = shards_of(whole)
    optimizer = Own([whole], lr=1.0)
    shards.put_into(optimizer, "stage 0")
    assert optimizer.param_groups[0]["params"] == [rows]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("hands_out", [False, True])
def test_holders_have_the_sums_of_their_rows_and_send_the_bytes_of_a_ring(num_ranks, hands_out):
    copies = holders(num_ranks, [((96, 40), torch.float32), ((96,), torch.float32)])
    sent = Counter()

    class Counting(OnTop):
        def send(self, edge, number, value):
            sent[edge.source] += sum(tensor.nbytes for tensor in tree.tensors(value))
            self.inner.send(edge, number, value)

        def recv(self, edge, number, waiting):
            return tree.replace(torch.Tensor, torch.clone, self.inner.recv(edge, number, waiting))

    reducers = [
        ShardedReducer(
            rank,
            SharedWeights(0, tuple(range(num_ranks)), frozenset({0}), copies[rank]),
            Counting(transport),
        )
        for rank, transport in enumerate(between_threads(num_ranks))
    ]
    fill(copies, 0)
    expected = folded(copies)
    shards = [Shards(reducer.shards) for reducer in reducers]

    def work(rank):
        reducer = reducers[rank]
        reducer.hands_sums_to_all = hands_out
        reducer.hand_in(1, 1)
        reducer.advance(averages=False)
        reducer.finish()
        shards[rank].lend()
        for whole, wanted in zip(copies[rank], expected, strict=True):
            shard = reducer.shards[whole]
            if shard.part is not None:
                assert torch.equal(shard.part.grad, wanted[shard.start : shard.stop])
                shard.part.data.sub_(shard.part.grad)
            assert (whole.grad is not None) == hands_out
        reducer.hand_back(1)
        reducer.take_back(1)

    on_all_ranks(work, num_ranks)
    for parameters in copies:
        for parameter, wanted in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.detach(), -wanted)
    num_bytes = sum(parameter.nbytes for parameter in copies[0])
    others, row = num_ranks - 1, copies[0][0][0].nbytes
    for rank in range(num_ranks):
        formula = (2 + hands_out) * others / num_ranks * num_bytes
        assert abs(sent[rank] - formula) <= 3 * others * row
